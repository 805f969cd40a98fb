"""Expert tensors under one set of names, however a checkpoint names or stacks them.

Our names are Qwen3-MoE's: ``mlp.gate.weight`` for the router, ``mlp.experts.E.{gate,up,down}_proj.weight`` for the
experts. Mixtral files say ``block_sparse_moe.gate`` and ``block_sparse_moe.experts.E.{w1,w3,w2}``; files written in
transformers' in-memory layout stack all experts of a layer in ``mlp.experts.{gate_up,down}_proj``. A stacked tensor
becomes one part an expert and matrix, each of which can be read without the others.

Shape legend: E experts, I intermediate size of an expert, D hidden size.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

_ROUTER = re.compile(r"(.*)\bblock_sparse_moe\.gate\.weight")
_MIXTRAL = re.compile(r"(.*)\bblock_sparse_moe\.experts\.(\d+)\.(w1|w2|w3)\.weight")
_MIXTRAL_NAMES = {"w1": "gate_proj", "w3": "up_proj", "w2": "down_proj"}
_STACKED = re.compile(r"(.*\bmlp\.experts)\.(gate_up_proj|down_proj)")


class ReadableTensor(Protocol):
    """A tensor, or one still in its file, of which only what is asked for is read."""

    @property
    def shape(self) -> Sequence[int]: ...

    def __getitem__(self, index: tuple[slice, ...], /) -> Tensor: ...


@dataclass(frozen=True, slots=True)
class TensorPart:
    """One checkpoint tensor in our names, as it lies in a stored one."""

    name: str
    shape: tuple[int, ...]
    origin: tuple[int, int] | None  # expert and first row within a stacked tensor; None: the stored tensor itself

    def read(self, stored: ReadableTensor, index: tuple[slice, ...]) -> Tensor:
        """``index`` of this part, every slice with both ends given."""
        if self.origin is None:
            return stored[index]
        expert, first_row = self.origin
        rows, columns = index
        own_rows = slice(first_row + rows.start, first_row + rows.stop)
        return stored[slice(expert, expert + 1), own_rows, columns].squeeze(0)


def expert_name(name: str) -> str:
    """``name`` in our spelling; what is no unstacked expert tensor keeps its name."""
    if match := _ROUTER.fullmatch(name):
        return f"{match[1]}mlp.gate.weight"
    if match := _MIXTRAL.fullmatch(name):
        return f"{match[1]}mlp.experts.{int(match[2])}.{_MIXTRAL_NAMES[match[3]]}.weight"
    return name


def tensor_parts(name: str, shape: Sequence[int]) -> Iterator[TensorPart]:
    """What a stored tensor holds: itself, or one part an expert and matrix where it stacks them."""
    match = _STACKED.fullmatch(name)
    if match is None or len(shape) != 3:
        yield TensorPart(expert_name(name), tuple(shape), None)
        return
    experts, rows, columns = shape
    matrices = ("gate_proj", "up_proj") if match[2] == "gate_up_proj" else ("down_proj",)
    for expert in range(experts):
        for i, matrix in enumerate(matrices):
            start, stop = i * rows // len(matrices), (i + 1) * rows // len(matrices)
            yield TensorPart(f"{match[1]}.{expert}.{matrix}.weight", (stop - start, columns), (expert, start))
