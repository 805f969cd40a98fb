"""Static buffers of one captured pass: every tensor of its inputs by name, refreshed in place before each replay.

The names come from walking the inputs' fields, nested ones included, so a tensor that is added to a batch is registered
without anybody remembering it. Contract of ``refresh``: afterwards every buffer holds the step's contents; a tensor
that is missing, unexpected or of another shape or type, and an integer of the metadata that differs from the captured
one, raise before anything is written. Worst fault guarded against: replaying over last step's contents.

Batches lie on the host and buffers on the device that passes run on; copies from pinned memory do not wait for it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, is_dataclass, replace
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor

from outrider.batch.forward_batch import PassInputs

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

P = TypeVar("P", bound=PassInputs)
D = TypeVar("D", bound="DataclassInstance")


class StaticInputs:
    def __init__(self, inputs: PassInputs, *, device: torch.device | str = "cpu") -> None:
        """Registers the tensors of ``inputs``, whose contents are copied to ``device``, and its constants."""
        tensors, constants = flatten(inputs)
        self._class = type(inputs)
        self._constants = constants
        self._buffers = {name: tensor.to(device, copy=True) for name, tensor in tensors.items()}

    @property
    def num_bytes(self) -> int:
        return sum(buffer.numel() * buffer.element_size() for buffer in self._buffers.values())

    def refresh(self, inputs: P) -> P:
        """``inputs`` on the buffers, which now hold its contents."""
        assert type(inputs) is self._class, f"captured for {self._class.__name__}, not {type(inputs).__name__}"
        tensors, constants = flatten(inputs)
        self._check(tensors, constants)
        for name, buffer in self._buffers.items():
            buffer.copy_(tensors[name], non_blocking=True)
        return _rebuilt(inputs, self._buffers)

    def _check(self, tensors: Mapping[str, Tensor], constants: Mapping[str, object]) -> None:
        missing, unexpected = self._buffers.keys() - tensors.keys(), tensors.keys() - self._buffers.keys()
        assert not missing, f"inputs of the captured pass are missing: {sorted(missing)}"
        assert not unexpected, f"inputs that the captured pass does not have: {sorted(unexpected)}"
        for name, buffer in self._buffers.items():
            given, captured = _signature(tensors[name]), _signature(buffer)
            assert given == captured, f"{name}: {given} differs from the captured {captured}"
        for name, value in self._constants.items():
            assert constants.get(name) == value, f"{name}={constants.get(name)} differs from the captured {value}"


def flatten(inputs: DataclassInstance, prefix: str = "") -> tuple[dict[str, Tensor], dict[str, object]]:
    """Tensors and constants of ``inputs`` by dotted name."""
    tensors: dict[str, Tensor] = {}
    constants: dict[str, object] = {}
    for field in fields(inputs):
        name, value = f"{prefix}{field.name}", getattr(inputs, field.name)
        if isinstance(value, Tensor):
            tensors[name] = value
        elif is_dataclass(value) and not isinstance(value, type):
            nested_tensors, nested_constants = flatten(value, f"{name}.")
            tensors |= nested_tensors
            constants |= nested_constants
        else:
            constants[name] = value
    return tensors, constants


def on_device(inputs: P, device: torch.device) -> P:
    """``inputs`` with its tensors on ``device``; itself where they are there by nature."""
    if device.type == "cpu":
        return inputs
    return _rebuilt(inputs, {name: x.to(device, non_blocking=True) for name, x in flatten(inputs)[0].items()})


def _rebuilt(inputs: D, buffers: Mapping[str, Tensor], prefix: str = "") -> D:
    """``inputs`` with every tensor replaced by the buffer of its name."""
    changes: dict[str, Any] = {}
    for field in fields(inputs):
        name, value = f"{prefix}{field.name}", getattr(inputs, field.name)
        if isinstance(value, Tensor):
            changes[field.name] = buffers[name]
        elif is_dataclass(value) and not isinstance(value, type):
            changes[field.name] = _rebuilt(value, buffers, f"{name}.")
    return replace(inputs, **changes)


def _signature(tensor: Tensor) -> tuple[torch.Size, torch.dtype]:
    return tensor.shape, tensor.dtype
