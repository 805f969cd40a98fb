"""Linear layers and the map from checkpoint names to their (possibly merged, stacked or sliced) weights.

A ``MergedLinear`` keeps several checkpoint matrices stacked in one weight so that one matmul serves all of them.
``checkpoint_slots`` gives, for every tensor a checkpoint should hold, the view that takes it and which part of it: a
loader copies into the views and an exporter reads from them, so neither knows what is merged or which rank holds what.
A module whose parameters are not the checkpoint's tensors one to one says so itself (``HasCheckpointSlots``).

Shape legend: N rows, I input features, O output features.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True, slots=True)
class CheckpointSlot:
    """Where a checkpoint tensor belongs."""

    shape: tuple[int, ...]  # of the whole tensor, as a checkpoint stores it
    view: Tensor | None  # what takes it, sharing storage with a parameter; None: other ranks hold all of it
    index: tuple[slice, ...] = ()  # the part that ``view`` takes; (): all of it


@runtime_checkable
class HasCheckpointSlots(Protocol):
    def checkpoint_slots(self, module_name: str) -> dict[str, CheckpointSlot]:
        """Slots of the module's own parameters, by full name; ``module_name`` is where the module stands."""
        ...


class Linear(nn.Module):
    """``y = x W^T (+ b)``. Weights are left uninitialised: whoever constructs it loads or initialises them."""

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        bias: bool,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ) -> None:
        super().__init__()
        self.in_features = in_features
        self.out_features = out_features
        self.weight = nn.Parameter(torch.empty(out_features, in_features, dtype=dtype, device=device))  # [O, I]
        self.bias = nn.Parameter(torch.empty(out_features, dtype=dtype, device=device)) if bias else None  # [O]

    def forward(self, x_NI: Tensor) -> Tensor:
        return F.linear(x_NI, self.weight, self.bias)


class MergedLinear(Linear):
    """Several checkpoint matrices with the same input, stacked along the output in the order of ``shard_sizes``."""

    def __init__(
        self,
        in_features: int,
        shard_sizes: Mapping[str, int],
        *,
        bias: bool,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ) -> None:
        super().__init__(in_features, sum(shard_sizes.values()), bias=bias, dtype=dtype, device=device)
        self.shard_rows: dict[str, tuple[int, int]] = {}
        start = 0
        for name, size in shard_sizes.items():
            self.shard_rows[name] = (start, start + size)
            start += size

    def checkpoint_slots(self, module_name: str) -> dict[str, CheckpointSlot]:
        """A shard is named as its sibling would be: ``self_attn.qkv_proj`` gives ``self_attn.q_proj``."""
        parent = module_name.rpartition(".")[0]
        slots = {}
        for parameter_name, parameter in self.named_parameters(recurse=False):
            for shard, (start, stop) in self.shard_rows.items():
                view = parameter.data[start:stop]
                slots[join_names(parent, shard, parameter_name)] = CheckpointSlot(tuple(view.shape), view)
        return slots

    def forward_from(self, x_NI: Tensor, *, first_shard: str) -> Tensor:
        """Outputs of ``first_shard`` and all shards after it, without computing those before."""
        start, _ = self.shard_rows[first_shard]
        return F.linear(x_NI, self.weight[start:], None if self.bias is None else self.bias[start:])


def checkpoint_slots(module: nn.Module) -> dict[str, CheckpointSlot]:
    """Every checkpoint tensor of ``module`` by name, those that other ranks hold included.

    A parameter shared by two modules (a tied head) appears once, under the name that comes first.
    """
    slots: dict[str, CheckpointSlot] = {}
    seen: set[int] = set()
    for module_name, child in module.named_modules():
        if isinstance(child, HasCheckpointSlots):
            slots |= child.checkpoint_slots(module_name)
            continue
        for parameter_name, parameter in child.named_parameters(recurse=False):
            if id(parameter) not in seen:
                seen.add(id(parameter))
                view = parameter.data
                slots[join_names(module_name, parameter_name)] = CheckpointSlot(tuple(view.shape), view)
    return slots


def checkpoint_views(module: nn.Module) -> dict[str, Tensor]:
    """The views of ``checkpoint_slots`` that this rank holds: with one rank, every checkpoint tensor whole."""
    return {name: slot.view for name, slot in checkpoint_slots(module).items() if slot.view is not None}


def join_names(*parts: str) -> str:
    return ".".join(part for part in parts if part)
