"""Options of the server itself; those of the engine behind it are ``outrider.config.EngineArgs``."""

from __future__ import annotations

from dataclasses import dataclass

from outrider.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerConfig:
    """``host`` is the loopback address unless the user says otherwise; port 0 lets the system choose one."""

    host: str = "127.0.0.1"
    port: int = 8000
    api_key: str = ""  # empty: no key is asked for
    served_model_name: str = ""  # empty: the engine's name for the model
    max_body_bytes: int = 4 * 1024 * 1024
    max_prompts: int = 256  # sequences of one request: prompts, and prompts times n
    body_timeout_s: float = 60.0  # a request body must have arrived by then
    drain_timeout_s: float = 30.0  # in-flight requests may finish for so long after SIGTERM
    log_interval_s: float = 10.0

    def __post_init__(self) -> None:
        if not 0 <= self.port <= 65535:
            raise ConfigError(f"port={self.port} must lie in 0..65535")
        for name in ("max_body_bytes", "max_prompts"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name}={getattr(self, name)} must be at least 1")
        for name in ("body_timeout_s", "log_interval_s"):
            if not getattr(self, name) > 0:
                raise ConfigError(f"{name}={getattr(self, name)} must be above 0")
        if not self.drain_timeout_s >= 0:
            raise ConfigError(f"drain_timeout_s={self.drain_timeout_s} must not be negative")
        if not self.api_key.isascii():
            raise ConfigError("api_key must be ASCII: it travels in an HTTP header")
