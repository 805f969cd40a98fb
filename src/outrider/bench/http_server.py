"""A server on a free port of this process, on a thread with an event loop of its own."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager

from outrider.bench.http_load import HttpTarget
from outrider.engine.async_engine import AsyncEngine
from outrider.engine.engine import Engine
from outrider.server.config import ServerConfig
from outrider.server.runner import HttpServer, bind

# A measurement has a progress bar; the server's periodic line would break it.
_CONFIG = ServerConfig(port=0, drain_timeout_s=0.0, log_interval_s=86400.0)


@contextmanager
def serving(core: Engine, model_name: str) -> Iterator[HttpTarget]:
    """Serve ``core``, idle so far, while the context lasts; what is in flight at its end is aborted."""
    started: Future[tuple[HttpServer, asyncio.AbstractEventLoop]] = Future()

    async def main() -> None:
        try:
            server = HttpServer(AsyncEngine(core, model_name=model_name), _CONFIG, bound=bind(_CONFIG))
        except BaseException as error:
            started.set_exception(error)
            return
        started.set_result((server, asyncio.get_running_loop()))
        await server.run()

    thread = threading.Thread(target=lambda: asyncio.run(main()), name="bench-server", daemon=True)
    thread.start()
    server, loop = started.result()
    try:
        yield HttpTarget(base_url=server.address, api_key="", in_this_process=True)
    finally:
        if thread.is_alive():
            loop.call_soon_threadsafe(server.request_stop)
        thread.join()
