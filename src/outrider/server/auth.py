"""Bearer-token check in front of every route but ``/health``, before anything of the request is read."""

from __future__ import annotations

import hashlib
import hmac

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from outrider.server.errors import ApiError

OPEN_PATHS = frozenset({"/health"})


class ApiKeyMiddleware:
    """Plain ASGI, so that streams and disconnects pass through untouched."""

    def __init__(self, app: ASGIApp, *, api_key: str) -> None:
        self._app = app
        self._digest = _digest(api_key)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"] not in OPEN_PATHS and not self._authorized(Headers(scope=scope)):
            error = ApiError(
                status=401,
                message="the Authorization header must be 'Bearer' followed by this server's API key",
                error_type="invalid_request_error",
                code="invalid_api_key",
                headers={"WWW-Authenticate": "Bearer"},
            )
            await error.response()(scope, receive, send)
            return
        await self._app(scope, receive, send)

    def _authorized(self, headers: Headers) -> bool:
        scheme, _, token = headers.get("authorization", "").partition(" ")
        # Digests have one length, so the time taken tells nothing about the key.
        return hmac.compare_digest(_digest(token.strip()), self._digest) and scheme.lower() == "bearer"


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode()).digest()
