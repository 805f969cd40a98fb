"""A server on a free port of this process, on a thread with an event loop of its own."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import httpx
from openai import DefaultHttpxClient, OpenAI
from tests.engine.groups import within

from outrider.server.config import ServerConfig
from outrider.server.engine_client import AsyncEngineClient
from outrider.server.runner import HttpServer, ServerReport, bind

TIMEOUT_S = 60.0  # far beyond need: a loaded machine must not fail a test


class LiveServer:
    def __init__(self, server: HttpServer, loop: asyncio.AbstractEventLoop) -> None:
        self.server = server
        self._loop = loop
        self.report: ServerReport | None = None
        self.finished = threading.Event()

    @property
    def url(self) -> str:
        return self.server.address

    # Without TLS there is nothing to verify, and loading the certificates takes longer than most tests.
    def http(self, **headers: str) -> httpx.Client:
        return httpx.Client(base_url=self.url, timeout=TIMEOUT_S, headers=headers, verify=False)

    def openai(self, api_key: str = "none") -> OpenAI:
        plain = DefaultHttpxClient(verify=False, timeout=TIMEOUT_S)
        return OpenAI(base_url=f"{self.url}/v1", api_key=api_key, max_retries=0, http_client=plain)

    def request_stop(self) -> None:
        self._loop.call_soon_threadsafe(self.server.request_stop)


@contextmanager
def serve(engine: AsyncEngineClient, *, config: ServerConfig | None = None) -> Iterator[LiveServer]:
    ready = threading.Event()
    started: list[LiveServer] = []

    async def main() -> None:
        options = config or ServerConfig(port=0, drain_timeout_s=0.0)
        live = LiveServer(HttpServer(engine, options, bound=bind(options)), asyncio.get_running_loop())
        started.append(live)
        ready.set()
        live.report = await live.server.run()
        live.finished.set()

    thread = threading.Thread(target=lambda: asyncio.run(main()), name="live-server")
    thread.start()
    assert ready.wait(TIMEOUT_S)
    live = started[0]
    try:
        yield live
    finally:
        if not live.finished.is_set():
            live.request_stop()
        thread.join(TIMEOUT_S)
        assert not thread.is_alive()


def eventually(condition: Callable[[], bool]) -> bool:
    """Whether ``condition`` comes true in time: for what another thread brings about."""
    return within(TIMEOUT_S, condition)
