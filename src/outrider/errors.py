"""Every error a user can meet. Internal invariants are asserts and never appear here.

Messages name the parameter, the value that was given and the rule it broke.
"""

from __future__ import annotations


class OutriderError(Exception):
    """Base of all errors raised on purpose."""


class ConfigError(OutriderError, ValueError):
    """A combination of options that cannot run; raised when the configuration is resolved, before weights load."""


class CheckpointError(OutriderError, ValueError):
    """A model or drafter file that is malformed, incomplete or does not fit; names the field or tensor."""


class InvalidRequestError(OutriderError, ValueError):
    """One request's input is wrong. Ends that request only; the HTTP layer answers 400.

    ``param`` is the name of the offending parameter as the user spelled it, or None where there is no single one.
    """

    def __init__(self, message: str, *, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


class QueueFullError(OutriderError):
    """The waiting queue is at its limit; the HTTP layer answers 429."""


class CollectiveError(OutriderError, RuntimeError):
    """A collective did not end: a rank is gone, or did not come within the timeout. Ends the group of ranks."""


class EngineDeadError(OutriderError, RuntimeError):
    """The engine loop ended by an error; every in-flight request is answered with this."""
