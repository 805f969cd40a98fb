"""Writing a drafter as a checkpoint directory in any of the three formats: the inverse of ``load_drafter``."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from outrider.config import DrafterConfig
from outrider.layers.checkpoint import checkpoint_views
from outrider.models.drafter_checkpoint_config import DrafterFormat, drafter_config_to_json
from outrider.models.drafter_checkpoint_tensors import (
    DRAFT_TO_TARGET,
    EMBEDDING,
    HEAD,
    TARGET_TO_DRAFT,
    expected_tensors,
)
from outrider.models.dspark import DSparkDrafter
from outrider.models.weights_safetensors import SINGLE_FILE


def save_drafter(
    model: DSparkDrafter,
    config: DrafterConfig,
    path: Path | str,
    *,
    fmt: DrafterFormat = "deepspec",
    vocabulary_tensors: bool = True,
) -> Path:
    """Write ``config.json`` and ``model.safetensors`` into ``path``, made if missing.

    ``vocabulary_tensors`` adds what other readers of the format expect though the target has it: full embedding and
    head copies for DeepSpec and SpecForge, the reduced head for speculators. ``load_drafter`` needs none of them.
    """
    directory = Path(path)
    content = drafter_config_to_json(config, fmt, dtype=str(model.fc.weight.dtype).removeprefix("torch."))
    views = checkpoint_views(model)
    tensors = {}
    for name in expected_tensors(config):
        assert views[name].is_whole, f"{name} is spread over ranks; only a whole drafter can be saved"
        tensors[name] = views[name].tensor
    reduced = config.draft_vocab_size < config.decoder.vocab_size
    if vocabulary_tensors and fmt != "speculators":
        tensors[EMBEDDING] = model.embed_tokens.weight.data
    if vocabulary_tensors and (reduced or fmt != "speculators"):
        tensors[HEAD] = model.lm_head.weight.data
    if reduced:
        tensors |= _vocabulary_maps(model.draft_to_target_V, config.decoder.vocab_size)
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    # Copies, since a file must not hold views of shared storage (a merged projection, a tied head).
    stored = {name: tensor.detach().cpu().clone().contiguous() for name, tensor in tensors.items()}
    save_file(stored, directory / SINGLE_FILE, metadata={"format": "pt"})
    return directory


def _vocabulary_maps(draft_to_target_V: Tensor, vocab_size: int) -> dict[str, Tensor]:
    flags_V = torch.zeros(vocab_size, dtype=torch.bool)
    flags_V[draft_to_target_V.cpu()] = True
    offsets_V = draft_to_target_V.cpu() - torch.arange(len(draft_to_target_V))
    return {DRAFT_TO_TARGET: offsets_V, TARGET_TO_DRAFT: flags_V}
