"""Weights as the compiled passes read them, and the file that keeps them between starts.

``PackedWeights`` is all that a native model is made from: packed matrices and plain tensors by name. Saved, it is one
safetensors file, which a later start maps instead of loading and packing the checkpoint again: pages are read when a
pass first touches them, and processes share them. The file says what it was made from (``Origin``); one of another
origin, or one that cannot be read, is reported and not used. Worst fault: weights of another checkpoint under this
one's name, hence the origin's key. Which files are kept, and for how long, is ``packed_cache``'s.
"""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from outrider.logger import get_logger
from outrider.ops.packed_matrix import PackedMatrix, WeightFormat

logger = get_logger(__name__)

_LINE = 64  # bytes tensors are aligned to, where their sizes allow
_DTYPES = {torch.uint8: "U8", torch.int64: "I64", torch.float32: "F32", torch.bfloat16: "BF16"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Origin:
    """What packed weights were made from."""

    sources: tuple[str, ...]  # paths
    variant: str  # what makes different weights of the same sources
    key: str  # a digest of the sources' state and of the code

    def to_metadata(self) -> dict[str, str]:
        return {"sources": json.dumps(self.sources), "variant": self.variant, "key": self.key}

    @classmethod
    def read(cls, path: Path) -> Origin:
        """Of a saved file. Raises ValueError where it says none, or is no such file."""
        try:
            with safe_open(path, framework="pt", device="cpu") as file:
                metadata = file.metadata() or {}
            return cls(sources=tuple(json.loads(metadata["sources"])), variant=metadata["variant"], key=metadata["key"])
        except (SafetensorError, OSError, KeyError, TypeError) as error:
            raise ValueError(f"{path}: {error}") from error


class InUse:
    """A shared lock on a file until this object is gone; whoever would delete the file asks for the whole lock."""

    def __init__(self, path: Path) -> None:
        """Raises OSError where there is no such file."""
        self._descriptor = os.open(path, os.O_RDONLY)
        with suppress(OSError):  # a file system without locks: nobody gets the whole lock there either
            fcntl.flock(self._descriptor, fcntl.LOCK_SH)

    def __del__(self) -> None:
        with suppress(AttributeError):  # never opened
            os.close(self._descriptor)


@dataclass(frozen=True, slots=True)
class PackedWeights:
    matrices: Mapping[str, PackedMatrix]
    tensors: Mapping[str, Tensor]
    in_use: InUse | None = None  # of the file that they are mapped from

    def save(self, path: Path, *, origin: Origin) -> None:
        """Write ``path`` in one move. Raises OSError."""
        plain = dict(self.tensors)
        for name, matrix in self.matrices.items():
            plain[f"{name}.data"] = matrix.data
            if matrix.bias is not None:
                plain[f"{name}.bias"] = matrix.bias
        shapes = {
            name: [int(matrix.weight_format), matrix.outputs, matrix.inputs, matrix.error]
            for name, matrix in self.matrices.items()
        }
        _write(path, plain, metadata={**origin.to_metadata(), "matrices": json.dumps(shapes)})

    @classmethod
    def load(cls, path: Path, *, key: str) -> PackedWeights | None:
        """What ``save`` wrote with this key, mapped. None where there is no such file, or no such key or data in it."""
        if not path.is_file():
            return None
        try:
            in_use = InUse(path)
            with safe_open(path, framework="pt", device="cpu") as file:
                metadata = file.metadata() or {}
                if metadata.get("key") != key:
                    logger.info("%s was made from other weights or by another version: packing anew", path.name)
                    return None
                tensors: dict[str, Tensor] = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
            matrices = {}
            for name, (code, outputs, inputs, error) in json.loads(metadata["matrices"]).items():
                matrices[name] = PackedMatrix(
                    tensors.pop(f"{name}.data"),
                    tensors.pop(f"{name}.bias", None),
                    weight_format=WeightFormat(code),
                    outputs=outputs,
                    inputs=inputs,
                    error=error,
                )
        except (SafetensorError, OSError, ValueError, KeyError, TypeError) as error:
            logger.warning("%s is damaged (%s): packing anew", path, error)
            return None
        return cls(matrices, tensors, in_use)


def _write(path: Path, tensors: Mapping[str, Tensor], *, metadata: Mapping[str, str]) -> None:
    """safetensors with data on cache lines: whole lines first, then by item size, so that no type is misaligned."""
    ordered = sorted(tensors.items(), key=lambda item: (item[1].nbytes % _LINE != 0, -item[1].element_size(), item[0]))
    header: dict[str, object] = {"__metadata__": dict(metadata)}
    position = 0
    for name, tensor in ordered:
        end = position + tensor.nbytes
        header[name] = {
            "dtype": _DTYPES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [position, end],
        }
        position = end
    described = json.dumps(header).encode()
    described += b" " * (-(8 + len(described)) % _LINE)
    path.parent.mkdir(parents=True, exist_ok=True)
    staged = path.with_suffix(f".{os.getpid()}")
    try:
        with staged.open("wb") as file:
            file.write(len(described).to_bytes(8, "little") + described)
            file.writelines(_bytes_of(tensor for _, tensor in ordered))
            file.flush()
            os.fsync(file.fileno())
        staged.replace(path)
    finally:
        staged.unlink(missing_ok=True)


def _bytes_of(tensors: Iterable[Tensor]) -> Iterable[memoryview]:
    for tensor in tensors:
        yield tensor.detach().contiguous().flatten().view(torch.uint8).numpy().data
