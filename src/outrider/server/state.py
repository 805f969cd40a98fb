"""What every route shares, and the one gate through which a request gets to the engine."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from outrider.server.config import ServerConfig
from outrider.server.engine_client import AsyncEngineClient
from outrider.server.errors import ENGINE_DEAD, bad_request, unavailable
from outrider.server.metrics import ServerMetrics
from outrider.server.prompts import PromptEncoder
from outrider.server.validation import show


class ServerState:
    """Lives on the event loop. ``in_flight`` counts admitted requests until their answer is written or dropped."""

    def __init__(self, engine: AsyncEngineClient, config: ServerConfig) -> None:
        self.engine = engine
        self.config = config
        self.model_name = config.served_model_name or engine.model_name
        self.metrics = ServerMetrics(engine, model_name=self.model_name)
        self.encoder = PromptEncoder(engine, max_prompts=config.max_prompts)
        self.draining = False
        self.in_flight = 0

    def check_ready(self) -> None:
        if self.draining:
            raise unavailable("the server is shutting down and takes no new requests", code="shutting_down")
        if not self.engine.healthy:
            raise unavailable(ENGINE_DEAD, code="engine_dead")

    @contextmanager
    def admit(self) -> Iterator[None]:
        self.check_ready()
        self.in_flight += 1
        try:
            yield
        finally:
            self.in_flight -= 1

    def check_model(self, model: str | None) -> None:
        """A request may leave the model open: there is only one."""
        if model is not None and model != self.model_name:
            raise bad_request(
                f"model={show(model)} does not exist; this server has {show(self.model_name)}",
                param="model",
                code="model_not_found",
                status=404,
            )

    def close(self) -> None:
        self.encoder.close()
