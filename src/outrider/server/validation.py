"""From the bytes of a request to a checked model: reads the body within its limits and words every refusal.

A refusal names the parameter (as a path, ``messages[0].role``), the value that was given and the rule it broke.
"""

from __future__ import annotations

import asyncio
import json
from typing import Any, TypeVar

import pydantic_core
from fastapi import Request
from pydantic import ValidationError
from pydantic_core import ErrorDetails

from outrider.server.errors import ApiError, bad_request
from outrider.server.protocol import StrictModel

Model = TypeVar("Model", bound=StrictModel)

_SHOWN_VALUE_CHARS = 80
# A client that only reads once it has sent everything still gets its 413 if the excess is small; beyond this it is cut.
_DISCARDED_BODIES = 16


def show(value: object) -> str:
    """A value as JSON for an error message, cut to a readable length."""
    if isinstance(value, str):
        value = value[: _SHOWN_VALUE_CHARS + 1]
    elif isinstance(value, list):
        value = value[: _SHOWN_VALUE_CHARS // 2]
    text = json.dumps(value, ensure_ascii=False, default=str)
    return text if len(text) <= _SHOWN_VALUE_CHARS else text[:_SHOWN_VALUE_CHARS] + "..."


async def read_body(request: Request, *, max_bytes: int, timeout_s: float) -> bytes:
    """The whole body, of at most ``max_bytes``, whether or not the client announced its length."""
    content_type = request.headers.get("content-type", "application/json").partition(";")[0].strip().lower()
    # Also what keeps a web page elsewhere from driving a server on localhost: browsers ask first for this type.
    is_json = content_type == "application/json" or content_type.endswith("+json")
    body = bytearray()
    received = 0
    try:
        async with asyncio.timeout(timeout_s):
            async for chunk in request.stream():
                received += len(chunk)
                if received <= max_bytes:
                    body += chunk
                elif received > max_bytes * _DISCARDED_BODIES:
                    break
    except TimeoutError:
        raise bad_request(
            f"the request body did not arrive within {timeout_s:g} s", param=None, code="body_timeout", status=408
        ) from None
    if received > max_bytes:
        raise ApiError(
            status=413,
            message=f"the request body has {request.headers.get('content-length', f'at least {received}')} bytes; "
            f"at most {max_bytes} are allowed",
            error_type="invalid_request_error",
            code="body_too_large",
            headers={"Connection": "close"},
        )
    if not is_json:
        raise bad_request(
            f"Content-Type is {show(content_type)}; it must be application/json",
            param=None,
            code="invalid_content_type",
        )
    return bytes(body)


def parse_request(body: bytes, model: type[Model]) -> Model:
    """Check ``body`` against ``model``. Every way of failing is a 400 in OpenAI's shape."""
    try:
        data = pydantic_core.from_json(body, allow_inf_nan=True)  # NaN is refused below, where it has a name
    except ValueError as error:
        raise bad_request(f"the request body is not valid JSON: {error}", param=None, code="invalid_json") from None
    if not isinstance(data, dict):
        raise bad_request(
            f"the request body is {show(data)}; it must be a JSON object", param=None, code="invalid_json"
        )
    try:
        return model.model_validate(data)
    except ValidationError as error:
        raise _refusal(error.errors(include_url=False, include_context=False), data, model) from None


def _refusal(errors: list[ErrorDetails], data: dict[str, Any], model: type[StrictModel]) -> ApiError:
    """Word the first error; where a value fits no form of a union, the form that came closest."""
    same = [error for error in errors if error["loc"][:1] == errors[0]["loc"][:1]]
    error = max(same, key=lambda e: len(_path(e["loc"], data)))
    path = _path(error["loc"], data)
    owner, field_path, description = _field_of(model, path)
    if error["type"] == "extra_forbidden":
        name = _spell(path)
        if path[-1] in owner.unsupported:
            rule, code = "this server does not support the parameter", "unsupported_parameter"
        else:
            rule, code = "unknown parameter", "unknown_parameter"
        return bad_request(f"{name}={show(error['input'])}: {rule}", param=name, code=code)
    name = _spell(field_path)
    if error["type"] == "missing":
        return bad_request(f"{name} is required: {description}", param=name, code="missing_required_parameter")
    value: Any = data
    for key in field_path:
        value = value[key]
    code = "invalid_value" if error["type"] == "literal_error" else "invalid_type"
    return bad_request(f"{name}={show(value)} must be {description}", param=name, code=code)


def _spell(path: tuple[int | str, ...]) -> str:
    return "".join(f"[{key}]" if isinstance(key, int) else f".{key}" for key in path).removeprefix(".")


def _path(loc: tuple[int | str, ...], data: Any) -> tuple[int | str, ...]:
    """``loc`` without the names of union members that pydantic puts between the keys."""
    path: list[int | str] = []
    for position, key in enumerate(loc):
        try:
            data = data[key]
        except (KeyError, IndexError, TypeError):
            if not (isinstance(data, dict) and position == len(loc) - 1):  # the last may be a field that is missing
                continue
        path.append(key)
    return tuple(path)


def _field_of(
    model: type[StrictModel], path: tuple[int | str, ...]
) -> tuple[type[StrictModel], tuple[int | str, ...], str | None]:
    """The innermost model on ``path``; ``path`` up to the last field of a model, and that field's description."""
    owner, end, description = model, 1, None
    for position, key in enumerate(path):
        if isinstance(key, str) and key in owner.model_fields:
            end, description = position + 1, owner.model_fields[key].description
            if end < len(path):
                owner = owner.nested.get(key, owner)
    return owner, path[:end], description
