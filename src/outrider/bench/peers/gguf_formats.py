"""The model's GGUF file in the formats that peers are fast with, kept in the cache directory.

Layer matrices get the format asked for, the embedding and the LM head Q8_0, norms stay fp32. The weights are those that
the file dequantises to, rounded anew: good for speed, while fidelity is that of two roundings.
"""

from __future__ import annotations

import hashlib
import os
from pathlib import Path
from typing import Any

import numpy as np
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType, GGUFValueType, LlamaFileType
from gguf.gguf_reader import GGUFReader, ReaderField
from gguf.gguf_writer import GGUFWriter
from gguf.quants import dequantize, quantize

from outrider.config import cache_dir
from outrider.errors import CheckpointError, ConfigError

FORMATS = ("file", "q4_0", "q8_0")  # file: as it is
_TYPES = {"q4_0": GGMLQuantizationType.Q4_0, "q8_0": GGMLQuantizationType.Q8_0}
_FILE_TYPES = {"q4_0": LlamaFileType.MOSTLY_Q4_0, "q8_0": LlamaFileType.MOSTLY_Q8_0}
_FILE_TYPE_KEY = "general.file_type"
_WRITTEN_BY_WRITER = ("GGUF.version", "GGUF.tensor_count", "GGUF.kv_count", "general.architecture")


def in_format(source: Path, name: str) -> Path:
    """A file like ``source`` in the format ``name`` (of ``FORMATS``), written unless the cache has it."""
    if name not in FORMATS:
        raise ConfigError(f"format {name!r} is not one of {', '.join(FORMATS)}")
    if name == "file":
        return source
    try:
        with source.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()[:16]
        kept = cache_dir() / "peers" / f"{source.stem}-{digest}-{name}.gguf"
        if not kept.exists():
            kept.parent.mkdir(parents=True, exist_ok=True)
            scratch = kept.with_name(f".{kept.name}.{os.getpid()}")
            try:
                _write(source, scratch, name)
                os.replace(scratch, kept)
            finally:
                scratch.unlink(missing_ok=True)
    except (OSError, ValueError, NotImplementedError) as error:
        raise CheckpointError(f"{source}: cannot be written in the format {name} ({error})") from error
    return kept


def _write(source: Path, place: Path, name: str) -> None:
    reader = GGUFReader(source)
    architecture = reader.get_field("general.architecture")
    if architecture is None:
        raise ValueError("no general.architecture")
    writer = GGUFWriter(place, architecture.contents())
    for field in reader.fields.values():
        if field.name not in _WRITTEN_BY_WRITER:
            _copy(field, writer, file_type=int(_FILE_TYPES[name]))
    for tensor in reader.tensors:
        values: np.ndarray[Any, Any] = tensor.data
        type_ = _new_type(tensor.name, tuple(int(size) for size in tensor.shape), _TYPES[name])
        if type_ != tensor.tensor_type:
            values = quantize(np.asarray(dequantize(values, tensor.tensor_type), dtype=np.float32), type_)
        writer.add_tensor(tensor.name, values, raw_dtype=type_)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _copy(field: ReaderField, writer: GGUFWriter, *, file_type: int) -> None:
    value = file_type if field.name == _FILE_TYPE_KEY else field.contents()
    kind = field.types[0]
    element = field.types[-1] if kind == GGUFValueType.ARRAY else None
    writer.add_key_value(field.name, value, kind, sub_type=element)


def _new_type(name: str, shape: tuple[int, ...], wanted: GGMLQuantizationType) -> GGMLQuantizationType:
    """``shape``: as GGUF has it, the length of a row first."""
    block, _ = GGML_QUANT_SIZES[wanted]
    if len(shape) < 2 or shape[0] % block:
        return GGMLQuantizationType.F32
    return wanted if name.startswith("blk.") else GGMLQuantizationType.Q8_0
