"""``Graph`` without CUDA: a replay runs the recorded callable again and puts its results where the capture's lie.

For tests of what surrounds a graph. Like a CUDA graph it reads the static buffers, ignores whatever else the caller
has, and overwrites the outputs that it gave at capture; unlike one it runs Python again, so a host read goes unnoticed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import is_dataclass
from typing import TypeVar

from torch import Tensor

from outrider.runner.static_inputs import flatten

T = TypeVar("T")


class EagerGraph:
    num_bytes = 0

    def capture(self, forward: Callable[[], T]) -> T:
        self._forward: Callable[[], object] = forward
        outputs = forward()
        self._outputs = tensors_of(outputs)
        return outputs

    def replay(self) -> None:
        found = tensors_of(self._forward())
        assert found.keys() == self._outputs.keys()
        for name, output in self._outputs.items():
            assert output.shape == found[name].shape, f"{name} has another shape than at capture"
            output.copy_(found[name])


def tensors_of(outputs: object) -> dict[str, Tensor]:
    """A pass's tensors by name: of a dataclass, or the one it is."""
    if isinstance(outputs, Tensor):
        return {"": outputs}
    if is_dataclass(outputs) and not isinstance(outputs, type):
        return flatten(outputs)[0]
    raise AssertionError(f"a pass gave {type(outputs).__name__}, which is neither a tensor nor a dataclass of them")
