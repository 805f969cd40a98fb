"""Every failure of the HTTP layer and its one shape: ``{"error": {"message", "type", "param", "code"}}``.

Handlers raise ``ApiError`` or let an engine error pass; ``to_api_error`` is the one place that maps errors to statuses.
What a client sees never contains a traceback or the text of an unforeseen exception.
"""

from __future__ import annotations

from collections.abc import Mapping

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException

from outrider.errors import EngineDeadError, InvalidRequestError, QueueFullError

ENGINE_DEAD = "the engine has ended by an error; the server must be restarted"
RETRY_AFTER_S = "1"  # a decode step is short, so the queue moves within a second


class ApiError(Exception):
    """An answer other than 2xx. ``param`` is the offending parameter as the user spelled it, where there is one."""

    def __init__(
        self,
        *,
        status: int,
        message: str,
        error_type: str,
        code: str | None = None,
        param: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.error_type = error_type
        self.code = code
        self.param = param
        self.headers = dict(headers or {})

    def body(self) -> dict[str, object]:
        return {
            "error": {"message": self.message, "type": self.error_type, "param": self.param, "code": self.code},
        }

    def response(self) -> JSONResponse:
        return JSONResponse(self.body(), status_code=self.status, headers=self.headers)


def bad_request(message: str, *, param: str | None, code: str = "invalid_value", status: int = 400) -> ApiError:
    return ApiError(status=status, message=message, error_type="invalid_request_error", code=code, param=param)


def unavailable(message: str, *, code: str) -> ApiError:
    return ApiError(
        status=503, message=message, error_type="server_error", code=code, headers={"Retry-After": RETRY_AFTER_S}
    )


def to_api_error(error: Exception) -> ApiError:
    """The answer to any exception raised while a request is handled. Logging an unforeseen one is the caller's."""
    match error:
        case ApiError():
            return error
        case InvalidRequestError():
            return bad_request(str(error), param=error.param)
        case QueueFullError():
            return ApiError(
                status=429,
                message=str(error),
                error_type="rate_limit_error",
                code="queue_full",
                headers={"Retry-After": RETRY_AFTER_S},
            )
        case EngineDeadError():
            return unavailable(ENGINE_DEAD, code="engine_dead")
        case HTTPException():
            return ApiError(
                status=error.status_code,
                message=str(error.detail),
                error_type="invalid_request_error" if error.status_code < 500 else "server_error",
                headers=error.headers,
            )
        case _:
            return ApiError(
                status=500,
                message="internal error; the server's log has the details",
                error_type="server_error",
                code="internal_error",
            )


def install_error_handlers(app: FastAPI) -> None:
    """Answer every exception in the one shape; one that was not foreseen also reaches the log, through uvicorn."""

    async def answer(request: Request, error: Exception) -> JSONResponse:
        api_error = to_api_error(error)
        if isinstance(error, HTTPException) and error.status_code in (404, 405):
            api_error.message = f"{error.detail}: {request.method} {request.url.path}"
        return api_error.response()

    handled: tuple[type[Exception], ...] = (
        ApiError,
        InvalidRequestError,
        QueueFullError,
        EngineDeadError,
        HTTPException,
        Exception,
    )
    for error_class in handled:
        app.add_exception_handler(error_class, answer)
