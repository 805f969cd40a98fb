"""Safetensors checkpoints: one file or an indexed set of shards, streamed tensor by tensor.

Nothing in the files is trusted: headers are checked before any tensor is mapped, index entries must name plain files of
the same directory, and what the index says must be what the shards hold. Pickled weights are never opened.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor

from outrider.errors import CheckpointError

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
_DTYPES = ("F32", "F16", "BF16", "F64", "I64", "I32", "BOOL")
_MAX_HEADER = 100_000_000  # bytes; the format's own limit


class StoredSlices:
    """A tensor in an open file; indexing reads that part of it and no more."""

    def __init__(self, file: Any, name: str) -> None:
        self._slices = file.get_slice(name)
        self.shape: Sequence[int] = tuple(self._slices.get_shape())

    def __getitem__(self, index: tuple[slice, ...]) -> Tensor:
        part: Tensor = self._slices[index] if index else self._slices[...]
        return part


def open_safetensors(directory: Path) -> Iterator[tuple[str, StoredSlices]]:
    """All tensors of the checkpoint in ``directory``, named as stored; each can be read until the next is asked for."""
    for shard, names in _shards(directory).items():
        try:
            with safe_open(shard, framework="pt", device="cpu") as file:
                for name in names:
                    yield name, StoredSlices(file, name)
        except (SafetensorError, OSError, ValueError) as error:
            raise CheckpointError(f"{shard}: cannot be read ({error})") from error


def iterate_safetensors(directory: Path) -> Iterator[tuple[str, Tensor]]:
    """All tensors of the checkpoint in ``directory``, read whole, named as stored."""
    for name, stored in open_safetensors(directory):
        yield name, stored[()]


def stored_bytes(directory: Path) -> int:
    """Size of the checkpoint's files in ``directory``."""
    return sum(shard.stat().st_size for shard in _shards(directory))


def tensor_headers(directory: Path) -> dict[str, dict[str, Any]]:
    """Dtype and shape of every tensor of the checkpoint in ``directory``, named as stored; no tensor is read."""
    headers: dict[str, dict[str, Any]] = {}
    for shard, names in _shards(directory).items():
        entries = read_header(shard)
        for name in names:
            shape = entries[name].get("shape")
            if not isinstance(shape, list) or not all(isinstance(size, int) and size >= 0 for size in shape):
                raise CheckpointError(f"{shard}: tensor {name!r} has a malformed shape {shape!r}")
            headers[name] = entries[name]
    return headers


def read_header(path: Path) -> dict[str, dict[str, Any]]:
    """Tensor name to its header entry, checked: a JSON object, no duplicate, known dtypes, offsets within the file."""
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            prefix = file.read(8)
            length = struct.unpack("<Q", prefix)[0] if len(prefix) == 8 else -1
            if not 2 <= length <= min(size - 8, _MAX_HEADER):
                raise CheckpointError(f"{path}: truncated or not a safetensors file ({size} bytes)")
            header = json.loads(file.read(length).decode("utf-8"), object_pairs_hook=_unique_keys)
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read ({error})") from error
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path}: malformed safetensors header ({error})") from error
    if not isinstance(header, dict):
        raise CheckpointError(f"{path}: malformed safetensors header (not a JSON object)")
    header.pop("__metadata__", None)
    for name, entry in header.items():
        _check_entry(path, name, entry, data_size=size - 8 - length)
    return header


def _check_entry(path: Path, name: str, entry: object, *, data_size: int) -> None:
    offsets = entry.get("data_offsets") if isinstance(entry, dict) else None
    if not isinstance(entry, dict) or not isinstance(offsets, list) or len(offsets) != 2:
        raise CheckpointError(f"{path}: tensor {name!r} has a malformed header entry")
    if entry.get("dtype") not in _DTYPES:
        raise CheckpointError(
            f"{path}: tensor {name!r} has dtype {entry.get('dtype')!r}; supported: {', '.join(_DTYPES)}"
        )
    if not all(isinstance(offset, int) for offset in offsets) or not 0 <= offsets[0] <= offsets[1]:
        raise CheckpointError(f"{path}: tensor {name!r} has malformed data offsets {offsets}")
    if offsets[1] > data_size:
        raise CheckpointError(
            f"{path}: truncated; tensor {name!r} ends at byte {offsets[1]} of the data, which has {data_size}"
        )


def _shards(directory: Path) -> dict[Path, list[str]]:
    """Each file with the tensors to take from it."""
    index, single = directory / INDEX_FILE, directory / SINGLE_FILE
    if index.is_file():
        return _indexed_shards(directory, index)
    if single.is_file():
        return {single: list(read_header(single))}
    pickled = sorted(path.name for path in directory.glob("*") if path.suffix in (".bin", ".pt", ".pth"))
    if pickled:
        raise CheckpointError(
            f"{directory}: only {', '.join(pickled)} found; pickled weights are never loaded, "
            "convert them to safetensors"
        )
    raise CheckpointError(f"{directory}: neither {SINGLE_FILE} nor {INDEX_FILE} found")


def _indexed_shards(directory: Path, index: Path) -> dict[Path, list[str]]:
    try:
        content = json.loads(index.read_text(encoding="utf-8"), object_pairs_hook=_unique_keys)
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{index}: not valid JSON ({error})") from error
    weight_map = content.get("weight_map") if isinstance(content, dict) else None
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{index}: no weight_map from tensor names to files")
    shards: dict[Path, list[str]] = {}
    for name, file_name in weight_map.items():
        if (
            not isinstance(file_name, str)
            or Path(file_name).name != file_name
            or not file_name.endswith(".safetensors")
        ):
            raise CheckpointError(
                f"{index}: tensor {name!r} is mapped to {file_name!r}; it must be a .safetensors file of this directory"
            )
        shards.setdefault(directory / file_name, []).append(name)
    for shard, names in shards.items():
        if not shard.is_file():
            raise CheckpointError(f"{index}: shard {shard.name} is missing")
        held = read_header(shard).keys()
        for name in names:
            if name not in held:
                raise CheckpointError(f"{shard}: tensor {name!r} is missing, though {index.name} places it here")
        for name in held - set(names):
            raise CheckpointError(f"{shard}: unexpected tensor {name!r}, which {index.name} does not place here")
    return shards


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"duplicate key {next(name for name in names if names.count(name) > 1)!r}")
    return result
