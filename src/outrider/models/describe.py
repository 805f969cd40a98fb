"""What a model is, before any weight is read: enough to refuse a combination of options early."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from outrider.config import DTypeName, ModelConfig, QuantizationName
from outrider.models.gguf_file import GGUFFile
from outrider.models.model_config import from_gguf
from outrider.models.source import check_vocabulary, directory_config, read_json, resolve_model
from outrider.models.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelDescription:
    name: str  # as the user wrote it
    path: Path
    config: ModelConfig
    dtype: DTypeName  # what ``--dtype auto`` means for it
    quantization: QuantizationName  # what ``--quantization auto`` means for it, where kernels are at hand
    metadata: Mapping[str, Any]  # of a GGUF file; empty for a directory

    def load_tokenizer(self) -> Tokenizer:
        """The tokenizer alone, for a process that loads no checkpoint."""
        if self.path.is_dir():
            tokenizer = Tokenizer.from_directory(self.path, eos_token_ids=self.config.eos_token_ids)
        else:
            tokenizer = Tokenizer.from_gguf(self.metadata, eos_token_ids=self.config.eos_token_ids)
        check_vocabulary(tokenizer, self.config, self.path)
        return tokenizer


def describe_model(name_or_path: str) -> ModelDescription:
    """Resolve a model (fetching it where its name asks for that) and read its configuration.

    The dtype is the checkpoint's own: bfloat16 if an HF configuration says so, else float32. Quantised GGUF weights
    are dequantised exactly only in float32.
    """
    path = resolve_model(name_or_path)
    if not path.is_dir():
        file = GGUFFile(path)
        config = from_gguf(file.metadata, file.tensor_shapes)
        return ModelDescription(
            name=name_or_path,
            path=path,
            config=config,
            dtype="float32",
            quantization="int4" if _layers_are_4_bit(file) else "int8",
            metadata=file.metadata,
        )
    raw = read_json(path / "config.json")
    said = raw.get("dtype", raw.get("torch_dtype"))
    return ModelDescription(
        name=name_or_path,
        path=path,
        config=directory_config(path, raw),
        dtype="bfloat16" if said == "bfloat16" else "float32",
        quantization="int8",
        metadata={},
    )


def _layers_are_4_bit(file: GGUFFile) -> bool:
    """Every matrix of every layer lies on a grid of 16 values per group of 32, which 4-bit packing keeps exactly."""
    matrices = [tensor for tensor in file.headers if tensor.name.startswith("blk.") and len(tensor.shape) == 2]
    return bool(matrices) and all(tensor.type_.name in ("Q4_0", "Q4_1") for tensor in matrices)
