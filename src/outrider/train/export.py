"""A trained drafter as something to ship: checkpoint, card, README.

Contract: the directory loads with ``load_drafter`` and needs nothing but the target beside it. Weights are bf16, the
format is speculators' (the one with a reduced draft vocabulary), and embedding and head are left to the target. What
the card claims was measured on the exported weights, not on the trainer's.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from outrider.models.drafter_card import DrafterCard, Measurement, SelfTest, write_card
from outrider.models.drafter_checkpoint_config import DrafterFormat
from outrider.models.drafter_checkpoint_save import save_drafter
from outrider.models.dspark import DSparkDrafter


@dataclass(frozen=True, slots=True, kw_only=True)
class SelfTestPlan:
    """Greedy decoding that the engine repeats at load; below ``share`` of the measured figure the drafter is broken."""

    prompts: tuple[tuple[int, ...], ...]
    max_tokens: int
    share: float

    def result(self, accepted_length: float) -> SelfTest:
        return SelfTest(
            prompts=self.prompts,
            max_tokens=self.max_tokens,
            accepted_length=round(accepted_length, 4),
            floor=max(1.0, round(self.share * accepted_length, 4)),
        )


@torch.no_grad()
def converted(drafter: DSparkDrafter, dtype: torch.dtype) -> DSparkDrafter:
    """The same drafter with its own weights in ``dtype``; embedding and head stay the target's."""
    copy = DSparkDrafter(
        drafter.config,
        embedding_VD=drafter.embed_tokens.weight,
        lm_head_VD=drafter.lm_head.weight,
        draft_to_target_V=drafter.draft_to_target_V,
        backend=drafter.backend,
        dtype=dtype,
    )
    own = dict(drafter.named_parameters())
    for name, parameter in copy.named_parameters():
        if name not in ("embed_tokens.weight", "lm_head.weight"):
            parameter.copy_(own[name])
    return copy.requires_grad_(False)


def export(
    drafter: DSparkDrafter,
    folder: Path,
    *,
    target: str,
    measurements: Sequence[Measurement],
    selftest: SelfTest | None,
    training: Mapping[str, Any],
) -> None:
    """Write ``config.json``, ``model.safetensors``, ``card.json`` and ``README.md``."""
    reduced = drafter.config.draft_vocab_size < drafter.config.decoder.vocab_size
    fmt: DrafterFormat = "speculators" if reduced else "deepspec"
    save_drafter(converted(drafter, torch.bfloat16), drafter.config, folder, fmt=fmt, vocabulary_tensors=False)
    card = DrafterCard(target=target, measurements=tuple(measurements), selftest=selftest, training=training)
    write_card(card, folder)
    (folder / "README.md").write_text(_readme(drafter, card), encoding="utf-8")


def _readme(drafter: DSparkDrafter, card: DrafterCard) -> str:
    config = drafter.config
    parameters = sum(
        parameter.numel()
        for name, parameter in drafter.named_parameters()
        if name not in ("embed_tokens.weight", "lm_head.weight")
    )
    lines = [
        f"# DSpark drafter for {card.target}",
        "",
        f"{parameters / 1e6:.1f} M parameters, bf16: {config.decoder.num_layers} layers, "
        f"{config.num_speculative_tokens} tokens a round, features of target layers {list(config.target_layer_ids)}, "
        f"{config.markov_head_type} Markov head of rank {config.markov_rank}, {config.draft_vocab_size} of "
        f"{config.decoder.vocab_size} vocabulary entries. Embedding and LM head are the target's.",
        "",
        "Trained on the target's answers to given and templated questions and to questions of its own, and on nothing "
        "else.",
        "",
    ]
    if card.measurements:
        lines += [
            "Accepted length is emitted tokens per round, the bonus token included; chat template, no top-p, no top-k, "
            "drafts sampled at the request's temperature.",
            "",
            "| prompts | temperature | new tokens | accepted length |",
            "|---|---|---|---|",
        ]
        lines += [
            f"| {m.data} ({m.prompts}) | {m.temperature:g} | {m.max_tokens} | {m.accepted_length:.3f} |"
            for m in card.measurements
        ]
        lines.append("")
    lines += ["Training:", "", *(f"* {key}: {_plain(value)}" for key, value in card.training.items()), ""]
    return "\n".join(lines)


def _plain(value: object) -> str:
    if isinstance(value, Mapping):
        return ", ".join(f"{key} {_plain(entry)}" for key, entry in value.items())
    if isinstance(value, (list, tuple)):
        return ", ".join(_plain(entry) for entry in value)
    return str(value)
