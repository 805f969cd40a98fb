"""Attention back ends by name. ``auto`` is the best one this build has for the device."""

from __future__ import annotations

from typing import Literal

from outrider.errors import ConfigError
from outrider.layers.attention.interface import AttentionBackend
from outrider.layers.attention.reference import ReferenceAttention

AttentionBackendName = Literal["auto", "reference"]


def get_attention_backend(name: str) -> AttentionBackend:
    if name in ("auto", "reference"):
        return ReferenceAttention()
    raise ConfigError(f"attention_backend={name!r} must be one of auto, reference")
