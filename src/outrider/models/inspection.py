"""What the loaders would make of a path, without reading a weight: the substance of ``outrider inspect``.

Configs are read and tensors placed by the same functions that load them, on headers alone. A tensor that does not fit
is part of the result, not an error; a file that cannot be understood at all raises ``CheckpointError`` as it would at
load. Drafters are looked at by themselves: whether one fits a target is checked when both are known.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, Literal

from outrider.config import DrafterConfig, ModelConfig
from outrider.layers.attention.registry import get_attention_backend
from outrider.layers.checkpoint import checkpoint_views
from outrider.models.drafter_card import read_card
from outrider.models.drafter_checkpoint import plan_directory
from outrider.models.drafter_checkpoint_config import read_drafter_config
from outrider.models.drafter_checkpoint_tensors import Shape, StoredTensor
from outrider.models.gguf_file import GGUFFile
from outrider.models.model_config import from_gguf
from outrider.models.registry import build_model
from outrider.models.source import directory_config, read_json, resolve_model
from outrider.models.weights import TORCH_DTYPES, check_size
from outrider.models.weights_experts import tensor_parts
from outrider.models.weights_gguf import hf_name
from outrider.models.weights_safetensors import tensor_headers
from outrider.parallel.state import SINGLE_RANK

_DRAFTER_KEYS = ("speculators_model_type", "dflash_config", "dspark_config", "target_layer_ids", "n_mtp_layers")


@dataclass(frozen=True, slots=True, kw_only=True)
class Inspection:
    path: Path
    kind: Literal["drafter", "model"]
    source_format: str  # deepspec, speculators, specforge, safetensors or gguf
    config: DrafterConfig | ModelConfig
    card: Mapping[str, Any]  # a drafter's card; empty for models
    used: Mapping[str, StoredTensor]  # name in the module -> what fills it
    derived: Mapping[str, str]  # name in the module -> where it comes from instead
    dropped: Mapping[str, str]  # stored name -> why
    missing: Mapping[str, Shape]
    unexpected: Mapping[str, Shape]
    mismatched: Mapping[str, str]
    stored_bytes: int  # of all tensors in the file

    @property
    def decoder(self) -> ModelConfig:
        return self.config.decoder if isinstance(self.config, DrafterConfig) else self.config

    @property
    def parameters(self) -> int:
        """Of the tensors used from the file."""
        return sum(prod(tensor.shape) for tensor in self.used.values())

    @property
    def kv_bytes_per_token(self) -> dict[str, int]:
        """By dtype of the KV cache: keys and values of all layers."""
        decoder = self.decoder
        values = 2 * decoder.num_layers * decoder.num_kv_heads * decoder.head_dim
        return {name: values * dtype.itemsize for name, dtype in TORCH_DTYPES.items()}

    @property
    def loadable(self) -> bool:
        return not (self.missing or self.unexpected or self.mismatched)

    def to_json(self) -> dict[str, Any]:
        return {
            "path": str(self.path),
            "kind": self.kind,
            "format": self.source_format,
            "loadable": self.loadable,
            "config": dataclasses.asdict(self.config),
            "card": dict(self.card),
            "tensors": {
                "used": {name: [t.name, list(t.shape), t.dtype] for name, t in self.used.items()},
                "derived": dict(self.derived),
                "dropped": dict(self.dropped),
                "missing": {name: list(shape) for name, shape in self.missing.items()},
                "unexpected": {name: list(shape) for name, shape in self.unexpected.items()},
                "mismatched": dict(self.mismatched),
            },
            "parameters": self.parameters,
            "stored_bytes": self.stored_bytes,
            "kv_bytes_per_token": self.kv_bytes_per_token,
        }


def inspect_path(name_or_path: str) -> Inspection:
    """A drafter directory, a model directory, a GGUF file, or any name that ``load_model`` knows."""
    path = resolve_model(name_or_path)
    if not path.is_dir():
        return _inspect_gguf(path)
    raw = read_json(path / "config.json")
    names = str(raw.get("architectures")).lower()
    if "dspark" in names or any(key in raw for key in _DRAFTER_KEYS) or any(key.startswith("dspark_") for key in raw):
        return _inspect_drafter(path)
    return _inspect_directory(path, raw)


def _inspect_drafter(path: Path) -> Inspection:
    config = read_drafter_config(path)
    plan = plan_directory(path, config, target_vocab_size=config.decoder.vocab_size)
    card = read_card(path)
    return Inspection(
        path=path,
        kind="drafter",
        source_format=config.source_format,
        config=config,
        card=dataclasses.asdict(card) if card.target else {},
        used=plan.used,
        derived=plan.derived,
        dropped=plan.dropped,
        missing=plan.missing,
        unexpected=plan.unexpected,
        mismatched=plan.mismatched,
        stored_bytes=_safetensors_bytes(path),
    )


def _inspect_directory(path: Path, raw: Mapping[str, Any]) -> Inspection:
    config = directory_config(path, raw)
    stored = {
        part.name: StoredTensor(name=name, shape=part.shape, dtype=entry["dtype"])
        for name, entry in tensor_headers(path).items()
        for part in tensor_parts(name.removeprefix("model."), entry["shape"])
    }
    return _inspect_model(path, "safetensors", config, stored, stored_bytes=_safetensors_bytes(path))


def _inspect_gguf(path: Path) -> Inspection:
    file = GGUFFile(path)
    config = from_gguf(file.metadata, file.tensor_shapes)
    stored = {
        hf_name(tensor.name): StoredTensor(name=tensor.name, shape=tensor.shape, dtype=tensor.type_.name)
        for tensor in file.headers
    }
    stored_bytes = sum(tensor.size for tensor in file.headers)
    return _inspect_model(path, "gguf", config, stored, stored_bytes=stored_bytes)


def _inspect_model(
    path: Path, source_format: str, config: ModelConfig, stored: dict[str, StoredTensor], *, stored_bytes: int
) -> Inspection:
    check_size(config, stored_bytes=stored_bytes, source=str(path))
    backend = get_attention_backend("auto")
    model = build_model(config, parallel=SINGLE_RANK, backend=backend, dtype=TORCH_DTYPES["float32"], device="meta")
    expected = {name: view.shape for name, view in checkpoint_views(model).items()}
    derived, dropped = {}, {}
    if config.tie_word_embeddings:
        derived["lm_head.weight"] = "the embedding (tied)"
        if "lm_head.weight" in stored and "lm_head.weight" not in expected:
            dropped[stored.pop("lm_head.weight").name] = "copy of the embedding (tied)"
    for name in [name for name in stored if name.endswith("rotary_emb.inv_freq")]:
        dropped[stored.pop(name).name] = "rotary table, computed from the config"
    known = {name: tensor for name, tensor in stored.items() if name in expected}
    return Inspection(
        path=path,
        kind="model",
        source_format=source_format,
        config=config,
        card={},
        used={name: tensor for name, tensor in known.items() if tensor.shape == expected[name]},
        derived=derived,
        dropped=dropped,
        missing={name: shape for name, shape in expected.items() if name not in stored},
        unexpected={tensor.name: tensor.shape for name, tensor in stored.items() if name not in expected},
        mismatched={
            tensor.name: f"{tensor.name} has shape {tensor.shape}, but the config asks for {expected[name]}"
            for name, tensor in known.items()
            if tensor.shape != expected[name]
        },
        stored_bytes=stored_bytes,
    )


def _safetensors_bytes(directory: Path) -> int:
    total = 0
    for entry in tensor_headers(directory).values():
        start, stop = entry["data_offsets"]
        total += stop - start
    return total
