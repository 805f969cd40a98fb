"""The map from checkpoint tensors to the parameters that hold them: merged, stacked, or sliced over ranks.

``checkpoint_views`` gives, for every tensor a checkpoint should hold, the place it belongs in and the part of it that
this rank takes. A loader copies into the views and an exporter reads from them, so neither knows what is merged or
sharded. A rank that takes nothing of a tensor (another's expert) still has a view of it, without elements: every tensor
of a checkpoint is accounted for on every rank.

Worst fault: a part that is off by a rank loads without an error; so parts are made by ``slice_for_rank`` alone.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from torch import Tensor, nn

from outrider.parallel.communicator import Communicator


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointView:
    """Where one checkpoint tensor goes."""

    tensor: Tensor  # what this rank holds of it, sharing storage with the parameter
    shape: tuple[int, ...]  # of the whole checkpoint tensor
    part: tuple[slice, ...]  # of the whole tensor, a slice per leading dimension: what ``tensor`` is

    @classmethod
    def whole(cls, tensor: Tensor) -> CheckpointView:
        return cls(tensor=tensor, shape=tuple(tensor.shape), part=())

    @property
    def is_whole(self) -> bool:
        return tuple(self.tensor.shape) == self.shape

    def copy_(self, stored: Tensor) -> None:
        """Fill the parameter from the whole checkpoint tensor, converting to its dtype and device."""
        assert tuple(stored.shape) == self.shape, f"{tuple(stored.shape)} is not {self.shape}"
        part = stored[self.part]
        assert part.shape == self.tensor.shape, f"{self.part} of {self.shape} is not {tuple(self.tensor.shape)}"
        self.tensor.copy_(part)


@runtime_checkable
class HoldsCheckpointParts(Protocol):
    """A module whose parameters are not simply the checkpoint's tensors under the same names."""

    def views_of(self, module_name: str, parameter_name: str, parameter: Tensor) -> dict[str, CheckpointView]:
        """The checkpoint tensors, by full name, that live in one own parameter of the module at ``module_name``."""
        ...


def checkpoint_views(module: nn.Module) -> dict[str, CheckpointView]:
    """Every checkpoint tensor of ``module`` by name, with the place it belongs in.

    A parameter shared by two modules (a tied head) appears once, under the name that comes first.
    """
    views: dict[str, CheckpointView] = {}
    seen: set[int] = set()
    for module_name, child in module.named_modules():
        for parameter_name, parameter in child.named_parameters(recurse=False):
            if id(parameter) in seen:
                continue
            seen.add(id(parameter))
            if isinstance(child, HoldsCheckpointParts):
                views |= child.views_of(module_name, parameter_name, parameter.data)
            else:
                views[join_names(module_name, parameter_name)] = CheckpointView.whole(parameter.data)
    return views


def join_names(*parts: str) -> str:
    return ".".join(part for part in parts if part)


def size_for_rank(name: str, size: int, group: Communicator) -> int:
    """An even share of ``size``; what does not divide is refused when the configuration is resolved, so asserted."""
    share, rest = divmod(size, group.size)
    assert rest == 0, f"{name}={size} does not divide by the {group.size} ranks that share it"
    return share


def slice_for_rank(name: str, size: int, group: Communicator) -> slice:
    """The own share of ``size`` rows or columns, in rank order."""
    share = size_for_rank(name, size, group)
    return slice(group.rank * share, (group.rank + 1) * share)
