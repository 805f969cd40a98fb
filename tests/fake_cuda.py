"""CUDA tensors without a CUDA device, and a proof that a forward can be recorded.

``fake_cuda`` runs models, buffers and passes on fake tensors of device ``cuda``: shapes, types and devices are
followed, contents are not there, so whatever would wait for the device to answer the host raises. ``RecordableGraph``
is a graph whose capture lets nothing pass that a CUDA graph cannot hold: no host read (fake tensors), no shape made of
contents (likewise), no tensor made or read on the host (``_DeviceOnly``), which covers copies from and to it.

A build of torch without CUDA indexes, copies and moves tensors of device ``cuda`` only when asked by operator:
``_ByOperator`` does that, and nothing else.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from tests.runner.eager_graph import EagerGraph
from torch import Tensor
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException, FakeTensorMode
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

T = TypeVar("T")
CUDA = torch.device("cuda")


class HostAccessError(AssertionError):
    """A recorded pass would have touched the host's memory."""


NOT_RECORDABLE = (HostAccessError, DataDependentOutputException, DynamicOutputShapeException)


@contextmanager
def fake_cuda() -> Iterator[None]:
    with FakeTensorMode(), _ByOperator(), torch.inference_mode():
        yield


class RecordableGraph(EagerGraph):
    """Captures what a CUDA graph could; see the module docstring."""

    def capture(self, forward: Callable[[], T]) -> T:
        with _DeviceOnly():  # type: ignore[no-untyped-call]
            return super().capture(forward)


class _DeviceOnly(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Refuses operators that read or make a tensor on the host. Numbers (without dimensions) are launch arguments."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves((args, kwargs, result)):
            if isinstance(tensor, Tensor) and tensor.device.type != "cuda" and tensor.dim():
                raise HostAccessError(f"{func} touches a tensor on {tensor.device}, shape {tuple(tensor.shape)}")
        return result


class _ByOperator(TorchFunctionMode):
    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func is Tensor.__getitem__:
            return _indexed(*args)
        if func is Tensor.to:
            return _moved(args[0], *args[1:], **(kwargs or {}))
        if func is Tensor.contiguous:
            return args[0] if args[0].is_contiguous() else args[0].clone(memory_format=torch.contiguous_format)
        if func is Tensor.copy_:
            return torch.ops.aten.copy_(*args, **(kwargs or {}))
        if func is Tensor.__setitem__:  # Python's x[i] += y ends in one
            place, index, value = args
            target = _indexed(place, index)
            return None if target is value else torch.ops.aten.copy_(target, value)
        return func(*args, **(kwargs or {}))


def _moved(x: Tensor, *args: Any, copy: bool = False, **kwargs: Any) -> Tensor:
    if args and isinstance(args[0], Tensor):
        args = (args[0].device, args[0].dtype)
    device, dtype, non_blocking, _ = torch._C._nn._parse_to(*args, **kwargs)
    device, dtype = device or x.device, dtype or x.dtype
    if not copy and (device.type, dtype) == (x.device.type, x.dtype):
        return x
    moved: Tensor = torch.ops.aten._to_copy(x, dtype=dtype, device=device, non_blocking=non_blocking)
    return moved


def _indexed(x: Tensor, index: Any) -> Tensor:
    """``x[index]`` by operators: slices, None, integers, and tensors (of which all then are one index)."""
    items = list(index) if isinstance(index, tuple) else [index]
    if Ellipsis in [item for item in items if not isinstance(item, Tensor)]:
        at = next(i for i, item in enumerate(items) if item is Ellipsis)
        items[at : at + 1] = [slice(None)] * (x.dim() - sum(item is not None for item in items) + 1)
    tensors: list[Tensor | None] = []
    for item in items:
        dim = len(tensors)
        if item is None:
            x = torch.ops.aten.unsqueeze(x, dim)
            tensors.append(None)
        elif isinstance(item, slice):
            assert item.step in (None, 1), "no other step is used"
            start, stop, _ = item.indices(x.shape[dim])
            x = torch.ops.aten.slice(x, dim, start, max(start, stop))
            tensors.append(None)
        elif isinstance(item, int):
            x = torch.ops.aten.select(x, dim, item)
        else:
            tensors.append(item if isinstance(item, Tensor) else torch.tensor(item, device=x.device))
    ops = torch.ops.aten
    found: Tensor = ops.alias(x) if all(tensor is None for tensor in tensors) else ops.index(x, tensors)
    return found
