"""Logging: one format, one environment variable (OUTRIDER_LOG_LEVEL), no handlers on the root logger."""

from __future__ import annotations

import logging
import os
import sys

_ROOT = "outrider"


def get_logger(name: str) -> logging.Logger:
    """Return the logger ``name`` below the package's root logger, configuring that root once."""
    root = logging.getLogger(_ROOT)
    if not root.handlers:
        handler = logging.StreamHandler(sys.stderr)
        handler.setFormatter(logging.Formatter("%(levelname).1s %(asctime)s %(name)s: %(message)s", "%H:%M:%S"))
        root.addHandler(handler)
        root.propagate = False
        level = os.environ.get("OUTRIDER_LOG_LEVEL", "INFO").upper()
        if level not in ("DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL"):
            raise ValueError(f"OUTRIDER_LOG_LEVEL={level!r} must be one of DEBUG, INFO, WARNING, ERROR, CRITICAL")
        root.setLevel(level)
    return logging.getLogger(name if name.startswith(_ROOT) else f"{_ROOT}.{name}")
