"""Filling a module from a stream of named tensors, with every tensor accounted for both ways.

Whatever the file format, a checkpoint arrives here as ``(name, tensor)`` pairs in any order. Each must have a place of
its own shape in the module, and each place must be filled exactly once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

import torch
from torch import Tensor, nn

from outrider.config import DTypeName, ModelConfig
from outrider.errors import CheckpointError
from outrider.layers.linear import checkpoint_views

TORCH_DTYPES: Mapping[DTypeName, torch.dtype] = {"float32": torch.float32, "bfloat16": torch.bfloat16}
_NAMES_SHOWN = 5


def check_size(config: ModelConfig, *, stored_bytes: int, source: str, owns_vocabulary: bool = True) -> None:
    """Refuse a config that no file of this size can fill, before memory for it is asked for.

    owns_vocabulary: the embedding is in the file. Every format spends at least a bit on a parameter.
    """
    heads = 2 * config.num_heads + 2 * config.num_kv_heads
    layer = config.hidden_size * (heads * config.head_dim + 3 * config.intermediate_size + 2)
    parameters = config.num_layers * layer + (config.vocab_size * config.hidden_size if owns_vocabulary else 0)
    if parameters > 8 * stored_bytes:
        raise CheckpointError(
            f"{source}: the config asks for {parameters} parameters (num_layers={config.num_layers}, "
            f"hidden_size={config.hidden_size}, intermediate_size={config.intermediate_size}, "
            f"num_heads={config.num_heads}, head_dim={config.head_dim}, vocab_size={config.vocab_size}); "
            f"the files hold {stored_bytes} bytes"
        )


def load_weights(
    module: nn.Module, tensors: Iterable[tuple[str, Tensor]], *, source: str, on_tensor: Callable[[], None]
) -> None:
    """Copy ``tensors`` into ``module``, converting to its dtype and device; ``on_tensor`` is called after each.

    ``source`` names the checkpoint in errors. A leading ``model.`` in names is dropped, rotary tables that old
    checkpoints carry are skipped, and a tied head stored a second time must equal the embedding.
    """
    views = checkpoint_views(module)
    filled: set[str] = set()
    tied_head: Tensor | None = None
    with torch.no_grad():
        for full_name, tensor in tensors:
            name = full_name.removeprefix("model.")
            if name.endswith("rotary_emb.inv_freq"):
                continue
            if name == "lm_head.weight" and name not in views and "embed_tokens.weight" in views:
                tied_head = tensor
                continue
            if name not in views:
                raise CheckpointError(f"{source}: unexpected tensor {full_name!r} of shape {tuple(tensor.shape)}")
            if name in filled:
                raise CheckpointError(f"{source}: tensor {full_name!r} appears more than once")
            view = views[name]
            if view.shape != tensor.shape:
                raise CheckpointError(
                    f"{source}: tensor {full_name!r} has shape {tuple(tensor.shape)}, "
                    f"but the config asks for {tuple(view.shape)}"
                )
            view.copy_(tensor)
            filled.add(name)
            on_tensor()
    missing = [name for name in views if name not in filled]
    if missing:
        shown = ", ".join(f"{name} {tuple(views[name].shape)}" for name in missing[:_NAMES_SHOWN])
        more = f" and {len(missing) - _NAMES_SHOWN} more" if len(missing) > _NAMES_SHOWN else ""
        raise CheckpointError(f"{source}: {len(missing)} missing tensors: {shown}{more}")
    if tied_head is not None:
        _check_tied(views["embed_tokens.weight"], tied_head, source=source)


def _check_tied(embedding_VD: Tensor, head_VD: Tensor, *, source: str) -> None:
    """A tied checkpoint may hold the head a second time; one that differs would be ignored silently."""
    if head_VD.shape != embedding_VD.shape or not torch.equal(head_VD.to(embedding_VD), embedding_VD):
        raise CheckpointError(
            f"{source}: tie_word_embeddings is true, but 'lm_head.weight' {tuple(head_VD.shape)} differs from "
            f"'embed_tokens.weight' {tuple(embedding_VD.shape)}"
        )
