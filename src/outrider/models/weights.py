"""Filling a module from a stream of named tensors, with every tensor accounted for both ways.

Whatever the file format, a checkpoint arrives here as ``(name, tensor)`` pairs in any order. Each must have a place of
its own shape in the module, and each place must be filled exactly once. A rank that shares a tensor with others takes
its part of it, and is as strict about the rest.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

import torch
from torch import Tensor, nn

from outrider.config import DTypeName, ModelConfig
from outrider.errors import CheckpointError
from outrider.layers.checkpoint import CheckpointView, checkpoint_views
from outrider.models.weights_experts import ReadableTensor, TensorPart, tensor_parts

TORCH_DTYPES: Mapping[DTypeName, torch.dtype] = {"float32": torch.float32, "bfloat16": torch.bfloat16}
_NAMES_SHOWN = 5


def check_size(config: ModelConfig, *, stored_bytes: int, source: str, owns_vocabulary: bool = True) -> None:
    """Refuse a config that no file of this size can fill, before memory for it is asked for.

    owns_vocabulary: the embedding is in the file. Every format spends at least a bit on a parameter.
    """
    moe = config.moe
    heads = 2 * config.num_heads + 2 * config.num_kv_heads
    sparse = sum(moe.sparse_layers) if moe else 0
    columns = config.num_layers * (heads * config.head_dim + 2) + (config.num_layers - sparse) * (
        3 * config.intermediate_size
    )
    if moe:
        columns += sparse * moe.num_experts * (3 * moe.moe_intermediate_size + 1)
    parameters = config.hidden_size * (columns + (config.vocab_size if owns_vocabulary else 0))
    if parameters > 8 * stored_bytes:
        experts = f", num_experts={moe.num_experts}, moe_intermediate_size={moe.moe_intermediate_size}" if moe else ""
        raise CheckpointError(
            f"{source}: the config asks for {parameters} parameters (num_layers={config.num_layers}, "
            f"hidden_size={config.hidden_size}, intermediate_size={config.intermediate_size}, "
            f"num_heads={config.num_heads}, head_dim={config.head_dim}, vocab_size={config.vocab_size}{experts}); "
            f"the files hold {stored_bytes} bytes"
        )


def load_weights(
    module: nn.Module, tensors: Iterable[tuple[str, ReadableTensor]], *, source: str, on_tensor: Callable[[], None]
) -> None:
    """Copy ``tensors`` into ``module``, converting to its dtype and device; ``on_tensor`` is called after each.

    ``source`` names the checkpoint in errors. A leading ``model.`` in names is dropped, rotary tables that old
    checkpoints carry are skipped, expert tensors may have any of the names and layouts that ``weights_experts`` knows,
    and a tied head stored a second time must equal the embedding.
    """
    views = checkpoint_views(module)
    filled: set[str] = set()
    tied_head: Tensor | None = None
    with torch.no_grad():
        for full_name, tensor in tensors:
            bare_name = full_name.removeprefix("model.")
            if bare_name.endswith("rotary_emb.inv_freq"):
                continue
            if bare_name == "lm_head.weight" and bare_name not in views and "embed_tokens.weight" in views:
                tied_head = tensor[part_index(tensor.shape)]
                continue
            for part in tensor_parts(bare_name, tensor.shape):
                if part.name not in views:
                    raise CheckpointError(f"{source}: unexpected tensor {full_name!r} of shape {tuple(tensor.shape)}")
                if part.name in filled:
                    raise CheckpointError(f"{source}: tensor {full_name!r} appears more than once")
                _fill(views[part.name], tensor, part, shown=f"{source}: tensor {full_name!r}")
                filled.add(part.name)
                on_tensor()
    missing = [name for name in views if name not in filled]
    if missing:
        shown = ", ".join(f"{name} {views[name].shape}" for name in missing[:_NAMES_SHOWN])
        more = f" and {len(missing) - _NAMES_SHOWN} more" if len(missing) > _NAMES_SHOWN else ""
        raise CheckpointError(f"{source}: {len(missing)} missing tensors: {shown}{more}")
    if tied_head is not None:
        _check_tied(views["embed_tokens.weight"].tensor, tied_head, source=source)


def _fill(view: CheckpointView, stored: ReadableTensor, part: TensorPart, *, shown: str) -> None:
    if view.shape != part.shape:
        named = "" if part.origin is None else f", which gives {part.name!r} the shape {part.shape}"
        raise CheckpointError(f"{shown} has shape {tuple(stored.shape)}{named}, but the config asks for {view.shape}")
    if view.tensor.numel():
        view.tensor.copy_(part.read(stored, part_index(view.shape, view.part)))


def part_index(shape: Sequence[int], part: tuple[slice, ...] = ()) -> tuple[slice, ...]:
    """``part`` of a tensor of ``shape``, with a slice for every dimension and both its ends given."""
    given = (*part, *(slice(None) for _ in range(len(shape) - len(part))))
    return tuple(slice(*along.indices(size)[:2]) for along, size in zip(given, shape, strict=True))


def _check_tied(embedding_VD: Tensor, head_VD: Tensor, *, source: str) -> None:
    """A tied checkpoint may hold the head a second time; one that differs would be ignored silently."""
    if head_VD.shape != embedding_VD.shape or not torch.equal(head_VD.to(embedding_VD), embedding_VD):
        raise CheckpointError(
            f"{source}: tie_word_embeddings is true, but 'lm_head.weight' {tuple(head_VD.shape)} differs from "
            f"'embed_tokens.weight' {tuple(embedding_VD.shape)}"
        )
