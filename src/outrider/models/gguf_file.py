"""Reading a GGUF file: metadata as plain Python values, tensor headers, and dequantised tensors.

Every length and offset is checked against the file before it is used, so a damaged file is a ``CheckpointError`` that
says where. Tensor data stay memory-mapped until they are dequantised.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize
from torch import Tensor

from outrider.errors import CheckpointError

_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_DEFAULT_ALIGNMENT = 32
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}  # by type id
_STRING, _ARRAY = 8, 9
_MAX_DIMENSIONS = 4
_SIZE = struct.Struct("<Q")


@dataclass(frozen=True, slots=True, kw_only=True)
class GGUFTensor:
    name: str
    shape: tuple[int, ...]  # row-major, as torch has it
    type_: GGMLQuantizationType
    start: int  # byte offset in the file
    size: int  # bytes


class GGUFFile:
    """An opened GGUF file."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            # A plain array over the map: slices of np.memmap's own type cost many times theirs.
            self._data: np.ndarray[Any, np.dtype[np.uint8]] = np.asarray(np.memmap(path, dtype=np.uint8, mode="r"))
        except (OSError, ValueError) as error:  # ValueError: an empty file cannot be mapped
            raise CheckpointError(f"{path}: cannot be read ({error})") from error
        cursor = _Cursor(path, self._data.data)
        if (magic := bytes(cursor.take(4))) != _MAGIC:
            raise CheckpointError(f"{path}: not a GGUF file (it starts with {magic!r}, not {_MAGIC!r})")
        version = cursor.number("I")
        if version not in _VERSIONS:
            raise CheckpointError(f"{path}: GGUF version {version} is not supported; supported: {_VERSIONS}")
        num_tensors, num_fields = cursor.number("Q"), cursor.number("Q")
        self.metadata: dict[str, Any] = {}
        for _ in range(num_fields):
            key = cursor.string()
            if key in self.metadata:
                raise CheckpointError(f"{path}: metadata key {key!r} appears more than once")
            self.metadata[key] = cursor.value(cursor.number("I"))
        self._tensors = self._read_tensor_headers(cursor, num_tensors)

    @property
    def headers(self) -> tuple[GGUFTensor, ...]:
        """Every tensor's header, in the file's order."""
        return tuple(self._tensors.values())

    @property
    def tensor_shapes(self) -> dict[str, tuple[int, ...]]:
        return {name: tensor.shape for name, tensor in self._tensors.items()}

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Every tensor in fp32, in the file's order and under its own name."""
        for tensor in self._tensors.values():
            yield tensor.name, self._dequantised(tensor)

    def _read_tensor_headers(self, cursor: _Cursor, count: int) -> dict[str, GGUFTensor]:
        headers = []
        for _ in range(count):
            name, num_dimensions = cursor.string(), cursor.number("I")
            if not 1 <= num_dimensions <= _MAX_DIMENSIONS:
                raise CheckpointError(f"{self.path}: tensor {name!r} has {num_dimensions} dimensions")
            shape = tuple(cursor.number("Q") for _ in range(num_dimensions))[::-1]
            headers.append((name, shape, cursor.number("I"), cursor.number("Q")))
        alignment = self.metadata.get("general.alignment", _DEFAULT_ALIGNMENT)
        if not isinstance(alignment, int) or alignment < 1:
            raise CheckpointError(f"{self.path}: general.alignment={alignment!r} must be a positive integer")
        data_start = -(-cursor.position // alignment) * alignment
        tensors: dict[str, GGUFTensor] = {}
        for name, shape, type_id, offset in headers:
            if name in tensors:
                raise CheckpointError(f"{self.path}: tensor {name!r} appears more than once")
            tensors[name] = self._located(name, shape, type_id=type_id, start=data_start + offset)
        return tensors

    def _located(self, name: str, shape: tuple[int, ...], *, type_id: int, start: int) -> GGUFTensor:
        """The header with its extent in bytes, which must lie within the file."""
        try:
            type_ = GGMLQuantizationType(type_id)
        except ValueError as error:
            raise CheckpointError(f"{self.path}: tensor {name!r} has unknown type {type_id}") from error
        block, block_bytes = GGML_QUANT_SIZES[type_]
        if 0 in shape:
            raise CheckpointError(f"{self.path}: tensor {name!r} has the empty shape {shape}")
        if shape[-1] % block:
            raise CheckpointError(f"{self.path}: tensor {name!r} {shape} does not divide into {type_.name} blocks")
        size = prod(shape) // block * block_bytes
        if start + size > len(self._data):
            raise CheckpointError(
                f"{self.path}: truncated; tensor {name!r} ends at byte {start + size}, the file has {len(self._data)}"
            )
        return GGUFTensor(name=name, shape=shape, type_=type_, start=start, size=size)

    def _dequantised(self, tensor: GGUFTensor) -> Tensor:
        raw = self._data[tensor.start : tensor.start + tensor.size].reshape(prod(tensor.shape[:-1]), -1)
        try:
            array = dequantize(raw, tensor.type_)
        except NotImplementedError as error:
            raise CheckpointError(
                f"{self.path}: tensor {tensor.name!r} has type {tensor.type_.name}, which cannot be dequantised"
            ) from error
        # A plain fp32 tensor comes back as the read-only map itself.
        return torch.from_numpy(np.require(array, dtype=np.float32, requirements=["C", "W"])).reshape(tensor.shape)


class _Cursor:
    """Reads forward through the header and refuses to leave the file."""

    def __init__(self, path: Path, data: memoryview) -> None:
        self.path = path
        self.position = 0
        self._data = data

    def take(self, size: int) -> memoryview:
        end = self.position + size
        if end > len(self._data):
            raise CheckpointError(
                f"{self.path}: truncated or malformed; the header asks for byte {end}, the file has {len(self._data)}"
            )
        part = self._data[self.position : end]
        self.position = end
        return part

    def number(self, code: str) -> Any:
        return struct.unpack(f"<{code}", self.take(struct.calcsize(f"<{code}")))[0]

    def string(self) -> str:
        start = self.position
        try:
            return str(self.take(self.number("Q")), "utf-8")
        except UnicodeDecodeError as error:
            raise CheckpointError(f"{self.path}: malformed; the string at byte {start} is not UTF-8") from error

    def strings(self, count: int) -> list[str]:
        """``count`` times ``string``, without its calls: a vocabulary has a hundred thousand."""
        found: list[str] = []
        data, position, size_at = self._data, self.position, _SIZE.unpack_from
        last = len(data) - _SIZE.size
        for _ in range(count):
            start = position + _SIZE.size
            end = start + size_at(data, position)[0] if position <= last else start
            if end > len(data):
                break
            try:
                found.append(str(data[start:end], "utf-8"))
            except UnicodeDecodeError:
                break
            position = end
        self.position = position
        while len(found) < count:  # the string that is at fault, for its message
            found.append(self.string())
        return found

    def value(self, type_id: int) -> Any:
        if type_id in _SCALARS:
            return self.number(_SCALARS[type_id])
        if type_id == _STRING:
            return self.string()
        if type_id != _ARRAY:
            raise CheckpointError(f"{self.path}: malformed; unknown value type {type_id} before byte {self.position}")
        element, count = self.number("I"), self.number("Q")
        if element in _SCALARS:
            code = _SCALARS[element]
            return list(struct.unpack(f"<{count}{code}", self.take(count * struct.calcsize(f"<{code}"))))
        if element == _STRING:
            return self.strings(count)
        raise CheckpointError(f"{self.path}: malformed; an array of value type {element} before byte {self.position}")
