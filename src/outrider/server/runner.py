"""The life of a serving process: bind, serve, log, drain, exit 0; or exit 1 where the engine has died.

The first SIGTERM or SIGINT starts the drain: the socket stays open, new work is answered with 503, and what is in
flight may finish for ``drain_timeout_s``. A second signal, or that time, ends the rest. uvicorn's own handling
would close the socket at once and end the process by the signal, so it is replaced. An engine that ends by an error
has answered everything in flight with it; the server then ends too, so that whoever runs it can start it again.
"""

from __future__ import annotations

import asyncio
import signal
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import uvicorn

from outrider.errors import ConfigError
from outrider.logger import get_logger
from outrider.outputs import EngineStats
from outrider.server.app import build_app
from outrider.server.config import ServerConfig
from outrider.server.engine_client import AsyncEngineClient
from outrider.server.metrics import kv_usage
from outrider.server.state import ServerState

logger = get_logger("server")

_POLL_S = 0.02
_HEALTH_POLL_S = 0.1
_BACKLOG = 2048
# How long answers that were cut short may take to be written out.
_CLOSE_TIMEOUT_S = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerReport:
    """What a serving process did, for ``--json``."""

    stats: EngineStats
    uptime_s: float
    drained: bool  # every in-flight request finished by itself
    engine_died: bool


class _UvicornServer(uvicorn.Server):
    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def bind(config: ServerConfig) -> socket.socket:
    """Take the address, before a model is loaded for nothing; clients are refused until the server listens."""
    listener = socket.socket(socket.AF_INET6 if ":" in config.host else socket.AF_INET)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((config.host, config.port))
    except OSError as error:
        listener.close()
        raise ConfigError(f"cannot listen on host={config.host} port={config.port}: {error}") from None
    return listener


class HttpServer:
    """One server on one event loop and one socket of ``bind``, which it closes at the end.

    Made, it takes connections, and answers them once it runs.
    """

    def __init__(self, engine: AsyncEngineClient, config: ServerConfig, *, bound: socket.socket) -> None:
        self._engine = engine
        self._config = config
        self._socket = bound
        bound.listen(_BACKLOG)
        self.state = ServerState(engine, config)
        self._stop = asyncio.Event()
        self._force = asyncio.Event()
        self._uvicorn = _UvicornServer(
            uvicorn.Config(
                build_app(self.state),
                lifespan="off",
                ws="none",
                log_config=None,
                access_log=False,
                server_header=False,
                timeout_graceful_shutdown=_CLOSE_TIMEOUT_S,
            )
        )

    @property
    def address(self) -> str:
        host, port = self._socket.getsockname()[:2]
        return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"

    def request_stop(self) -> None:
        """Start the drain; a second call ends it. For the event loop's thread, as signal handlers are."""
        if self._stop.is_set():
            self._force.set()
        self._stop.set()

    async def run(self) -> ServerReport:
        loop = asyncio.get_running_loop()
        started = loop.time()
        serving = asyncio.create_task(self._uvicorn.serve(sockets=[self._socket]))
        logging = asyncio.create_task(log_periodically(self._engine, interval_s=self._config.log_interval_s))
        stopping = asyncio.create_task(self._stop.wait())
        dying = asyncio.create_task(self._until_engine_dies())
        logger.info("serving %s on %s", self.state.model_name, self.address)
        try:
            await asyncio.wait((serving, stopping, dying), return_when=asyncio.FIRST_COMPLETED)
            drained = await self._drain()
            await self._engine.shutdown(0.0)
            stats = self._engine.stats()
            self._uvicorn.should_exit = True
            await serving
        finally:
            for task in (serving, logging, stopping, dying):
                task.cancel()
            await asyncio.gather(serving, logging, stopping, dying, return_exceptions=True)
            self.state.close()
            self._socket.close()
        healthy = self._engine.healthy
        return ServerReport(
            stats=stats, uptime_s=loop.time() - started, drained=drained and healthy, engine_died=not healthy
        )

    async def _until_engine_dies(self) -> None:
        while self._engine.healthy:
            await asyncio.sleep(_HEALTH_POLL_S)
        logger.error("the engine has ended by an error: the server ends")

    async def _drain(self) -> bool:
        """True if everything in flight finished by itself."""
        self.state.draining = self._engine.healthy  # a dead engine is the better reason to give
        limit_s = self._config.drain_timeout_s if self._engine.healthy else _CLOSE_TIMEOUT_S
        if self.state.in_flight:
            logger.info("draining: %d requests in flight, %g s at most", self.state.in_flight, limit_s)
        loop = asyncio.get_running_loop()
        deadline = loop.time() + limit_s
        while self.state.in_flight and loop.time() < deadline and not self._force.is_set():
            await asyncio.sleep(_POLL_S)
        if self.state.in_flight:
            logger.warning("drain ended with %d requests in flight; they are aborted", self.state.in_flight)
        return not self.state.in_flight


def run_server(engine: AsyncEngineClient, config: ServerConfig, *, bound: socket.socket) -> ServerReport:
    """Serve until SIGTERM or SIGINT, then drain. For the main thread, which is where signals arrive."""

    async def main() -> ServerReport:
        server = HttpServer(engine, config, bound=bound)
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, server.request_stop)
        try:
            return await server.run()
        finally:
            for number in (signal.SIGTERM, signal.SIGINT):
                loop.remove_signal_handler(number)

    return asyncio.run(main())


async def log_periodically(engine: AsyncEngineClient, *, interval_s: float) -> None:
    """One line per interval in which the engine had anything to do."""
    before = engine.stats()
    while True:
        await asyncio.sleep(interval_s)
        now = engine.stats()
        line = progress_line(before, now, interval_s=interval_s)
        if line:
            logger.info("%s", line)
        before = now


def progress_line(before: EngineStats, now: EngineStats, *, interval_s: float) -> str:
    """Throughput and drafting of the interval; empty when it was idle."""
    prompt = now.prompt_tokens_total - before.prompt_tokens_total
    generated = now.generation_tokens_total - before.generation_tokens_total
    if not (prompt or generated or now.num_running or now.num_waiting):
        return ""
    rounds = now.spec.rounds - before.spec.rounds
    offered = now.spec.offered - before.spec.offered
    drafting = "no rounds"
    if rounds:
        length = (now.spec.emitted - before.spec.emitted) / rounds
        rate = (now.spec.accepted - before.spec.accepted) / offered if offered else 0.0
        drafting = f"accepted length {length:.2f}, acceptance rate {rate:.1%}"
    return (
        f"prompt {prompt / interval_s:.1f} tokens/s, generation {generated / interval_s:.1f} tokens/s, "
        f"running {now.num_running}, waiting {now.num_waiting}, KV use {kv_usage(now):.1%}, {drafting}"
    )
