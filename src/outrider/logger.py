"""Logging: one format, one environment variable (OUTRIDER_LOG_LEVEL), no handlers on the root logger."""

from __future__ import annotations

import logging
import os
import sys

_ROOT = "outrider"
_FORMAT = "%(levelname).1s %(asctime)s {}%(name)s: %(message)s"
_TIME = "%H:%M:%S"


def mark_rank(rank: int) -> None:
    """Put the rank into every line of this process. Ranks behind the first only speak up when something is wrong."""
    root = get_logger(_ROOT)
    for handler in root.handlers:
        handler.setFormatter(logging.Formatter(_FORMAT.format(f"[rank {rank}] "), _TIME))
    if rank and root.level == logging.INFO:
        root.setLevel(logging.WARNING)


def get_logger(name: str) -> logging.Logger:
    """Return the logger ``name`` below the package's root logger, configuring that root once."""
    root = logging.getLogger(_ROOT)
    if not root.handlers:
        handler = logging.StreamHandler(sys.stderr)
        handler.setFormatter(logging.Formatter(_FORMAT.format(""), _TIME))
        root.addHandler(handler)
        root.propagate = False
        level = os.environ.get("OUTRIDER_LOG_LEVEL", "INFO").upper()
        if level not in ("DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL"):
            raise ValueError(f"OUTRIDER_LOG_LEVEL={level!r} must be one of DEBUG, INFO, WARNING, ERROR, CRITICAL")
        root.setLevel(level)
    return logging.getLogger(name if name.startswith(_ROOT) else f"{_ROOT}.{name}")
