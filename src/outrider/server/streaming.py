"""Server-sent events. An answer that fails before its first event is an ordinary error response; after it, an event.

Unlike Starlette's StreamingResponse this one waits for its first event before it commits to a status, and watches for
the client's departure even while nothing is being sent.
"""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator
from contextlib import aclosing

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from outrider.logger import get_logger
from outrider.server.errors import to_api_error
from outrider.server.generation import ClientDisconnectedError, until_disconnect
from outrider.server.responses import Json

logger = get_logger("server")

DONE = b"data: [DONE]\n\n"


def encode_event(payload: Json) -> bytes:
    return (
        b"data: " + json.dumps(payload, ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode() + b"\n\n"
    )


class EventStreamResponse(Response):
    """Sends the objects of ``events`` as they come, then ``[DONE]``; closes ``events`` however it ends."""

    media_type = "text/event-stream"

    def __init__(self, events: AsyncGenerator[Json, None]) -> None:
        super().__init__(headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        del self.headers["content-length"]
        self._events = events

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await until_disconnect(receive, self._send_events(send))
        except ClientDisconnectedError:
            logger.debug("client left a stream of %s", scope["path"])

    async def _send_events(self, send: Send) -> None:
        async with aclosing(self._events) as events:
            first = await anext(events)  # raises the errors that deserve a status of their own
            await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
            await _send_chunk(send, encode_event(first))
            try:
                async for event in events:
                    await _send_chunk(send, encode_event(event))
            except Exception as error:
                api_error = to_api_error(error)
                if api_error.status == 500:
                    logger.error("a stream failed", exc_info=error)
                await _send_chunk(send, encode_event(api_error.body()))
            await _send_chunk(send, DONE)
            await send({"type": "http.response.body", "body": b"", "more_body": False})


async def _send_chunk(send: Send, chunk: bytes) -> None:
    await send({"type": "http.response.body", "body": chunk, "more_body": True})
