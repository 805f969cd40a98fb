"""Weights as the compiled passes read them, and the file in the cache that keeps them between starts.

``PackedWeights`` is all that a native model is made from: packed matrices and plain tensors by name. Saved, it is one
safetensors file, which a later start maps instead of loading and packing the checkpoint again: pages are read when a
pass first touches them, and processes share them. The file carries the key of what it was made from (the checkpoint's
files, the quantization, the dtype, and the code that packs), and one with another key, or one that cannot be read, is
reported and made anew. Worst fault: weights of another checkpoint under this one's name, hence the key.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from outrider.config import cache_dir
from outrider.logger import get_logger
from outrider.ops import native_kernels
from outrider.ops.packed_matrix import PackedMatrix, WeightFormat

logger = get_logger(__name__)

_LINE = 64  # bytes tensors are aligned to, where their sizes allow
_DTYPES = {torch.uint8: "U8", torch.int64: "I64", torch.float32: "F32", torch.bfloat16: "BF16"}
_SOURCES = ("ops", "ops/native", "layers", "models")  # code that weights come through, below the package
_DIRECTORY_SUFFIXES = (".safetensors", ".json")  # what of a checkpoint directory shapes a model


@dataclass(frozen=True, slots=True)
class PackedWeights:
    matrices: Mapping[str, PackedMatrix]
    tensors: Mapping[str, Tensor]

    def save(self, path: Path, *, key: str) -> None:
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
        _write(path, plain, metadata={"key": key, "matrices": json.dumps(shapes)})

    @classmethod
    def load(cls, path: Path, *, key: str) -> PackedWeights | None:
        """What ``save`` wrote with this key, mapped. None where there is no such file, or no such key or data in it."""
        if not path.is_file():
            return None
        try:
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
        return cls(matrices, tensors)


def cached_weights(*sources: Path, variant: str, make: Callable[[], PackedWeights]) -> PackedWeights:
    """The packed weights of a checkpoint: mapped from the cache, or made, and kept there for the next start.

    ``sources``: the checkpoint, and others that went into it. ``variant``: what makes different weights of the same
    checkpoints; each has a file of its own.
    """
    key = weights_key(*sources, variant=variant)
    named = "\0".join((variant, *(str(source.resolve()) for source in sources)))
    place = hashlib.sha256(named.encode()).hexdigest()[:12]
    path = packed_directory() / f"{sources[0].stem}-{variant}-{place}.safetensors"
    weights = PackedWeights.load(path, key=key)
    if weights is not None:
        return weights
    weights = make()
    try:
        weights.save(path, key=key)
    except OSError as error:
        logger.info("%s cannot be kept (%s): weights are packed again by the next process", path.name, error)
    return weights


def packed_directory() -> Path:
    return cache_dir() / "packed"


def weights_key(*sources: Path, variant: str) -> str:
    """Of everything that shapes packed weights: files by path, size and time of change, and the code's digest."""
    described = [variant, _code_digest()]
    for source in sources:
        inside = sorted(source.iterdir()) if source.is_dir() else ()
        for path in [path for path in inside if path.suffix in _DIRECTORY_SUFFIXES] or [source]:
            status = path.stat()
            described += [str(path.resolve()), str(status.st_size), str(status.st_mtime_ns)]
    return hashlib.sha256("\0".join(described).encode()).hexdigest()


@cache
def _code_digest() -> str:
    """Packed bits follow from code alone, so no version is kept by hand that a change could forget."""
    package = Path(native_kernels.__file__).parents[1]
    digest = hashlib.sha256()
    for path in sorted(path for folder in _SOURCES for path in (package / folder).iterdir() if path.is_file()):
        digest.update(path.read_bytes())
    return digest.hexdigest()


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
