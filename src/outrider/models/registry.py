"""Architecture name to model class, imported when first asked for."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

import torch

from outrider.config import ModelConfig
from outrider.errors import ConfigError
from outrider.layers.attention.interface import AttentionBackend
from outrider.parallel.state import ParallelState

if TYPE_CHECKING:
    from outrider.models.decoder import Decoder

_CLASSES = {
    "LlamaForCausalLM": ("outrider.models.decoder", "Decoder"),
    "MixtralForCausalLM": ("outrider.models.decoder", "Decoder"),
    "Qwen3ForCausalLM": ("outrider.models.decoder", "Decoder"),
    "Qwen3MoeForCausalLM": ("outrider.models.decoder", "Decoder"),
}


def build_model(
    config: ModelConfig,
    *,
    parallel: ParallelState,
    backend: AttentionBackend,
    dtype: torch.dtype,
    device: torch.device | str,
) -> Decoder:
    """An uninitialised model of the config's architecture: the part of it that this rank holds."""
    if config.architecture not in _CLASSES:
        raise ConfigError(
            f"architecture {config.architecture!r} has no implementation; supported: {', '.join(sorted(_CLASSES))}"
        )
    module_name, class_name = _CLASSES[config.architecture]
    model_class: type[Decoder] = getattr(import_module(module_name), class_name)
    return model_class(config, parallel=parallel, backend=backend, dtype=dtype, device=device)
