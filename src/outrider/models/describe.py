"""What a model is, before any weight is read: enough to refuse a combination of options early."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from outrider.config import DTypeName, ModelConfig
from outrider.models.gguf_file import GGUFFile
from outrider.models.model_config import from_gguf
from outrider.models.source import directory_config, read_json, resolve_model


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelDescription:
    name: str  # as the user wrote it
    path: Path
    config: ModelConfig
    dtype: DTypeName  # what ``--dtype auto`` means for it


def describe_model(name_or_path: str) -> ModelDescription:
    """Resolve a model (fetching it where its name asks for that) and read its configuration.

    The dtype is the checkpoint's own: bfloat16 if an HF configuration says so, else float32. Quantised GGUF weights
    are dequantised exactly only in float32.
    """
    path = resolve_model(name_or_path)
    if not path.is_dir():
        file = GGUFFile(path)
        config = from_gguf(file.metadata, file.tensor_shapes)
        return ModelDescription(name=name_or_path, path=path, config=config, dtype="float32")
    raw = read_json(path / "config.json")
    said = raw.get("dtype", raw.get("torch_dtype"))
    return ModelDescription(
        name=name_or_path,
        path=path,
        config=directory_config(path, raw),
        dtype="bfloat16" if said == "bfloat16" else "float32",
    )
