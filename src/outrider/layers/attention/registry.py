"""Attention back ends by name. ``auto`` is the best one this build has for the device."""

from __future__ import annotations

from typing import Literal

import torch

from outrider.errors import ConfigError
from outrider.layers.attention.interface import AttentionBackend
from outrider.layers.attention.reference import ReferenceAttention
from outrider.layers.attention.static import StaticAttention

AttentionBackendName = Literal["auto", "reference", "static"]


def get_attention_backend(name: str, *, device: torch.device | str = "cpu") -> AttentionBackend:
    """``reference`` reads lengths on the host, so that no pass with it can be captured on ``device`` cuda."""
    on_host = torch.device(device).type != "cuda"
    match name:
        case "auto":
            return ReferenceAttention() if on_host else StaticAttention()
        case "reference":
            return ReferenceAttention()
        case "static":
            return StaticAttention()
    raise ConfigError(f"attention_backend={name!r} must be one of auto, reference, static")
