"""Shared by the sampling tests: sequences, rows, a drafter made of tables, and a chi-square test."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from outrider.ops.compiled_head import CompiledHead
from outrider.sampling.processors import Distribution
from outrider.sampling.random import Role
from outrider.sampling.sampler import row_uniforms, sample_at
from outrider.sampling.state import LogitRow, SequenceState
from outrider.sampling_params import SamplingParams

EOS = 2


def make_state(
    *, seed: int = 0, prompt: Sequence[int] = (0,), output: Sequence[int] = (), **params: Any
) -> SequenceState:
    params.setdefault("max_tokens", None)
    state = SequenceState(params=SamplingParams(**params), seed=seed, prompt_token_ids=prompt, eos_token_ids=(EOS,))
    state.append(output)
    return state


def verify_rows(state: SequenceState, drafts: Sequence[int] = ()) -> list[LogitRow]:
    """The anchor's row and one behind each draft; the anchor is the last token of prompt and output."""
    anchor = len(state.prompt_token_ids) + len(state.output_token_ids) - 1
    return [LogitRow(state, tuple(drafts[:j]), anchor + 1 + j, anchor) for j in range(len(drafts) + 1)]


def sample(dist: Distribution, rows: Sequence[LogitRow], role: Role = Role.TARGET) -> Tensor:
    """One token per row, int64 [N]."""
    return sample_at(dist, row_uniforms(rows, role))


class TableDrafter:
    """A sequential head whose bias and confidence are tables over the previous token."""

    compiled_head: CompiledHead | None = None

    def __init__(self, *, bias_VVd: Tensor, draft_to_target_V: Tensor, confidence_V: Tensor) -> None:
        self.bias_VVd = bias_VVd
        self.draft_to_target_V = draft_to_target_V
        self.confidence_V = confidence_V

    @classmethod
    def flat(cls, vocab_size: int, draft_to_target: Sequence[int] | None = None) -> TableDrafter:
        """No bias at all: drafts come from the base logits, in a compiled walk too."""
        ids = torch.arange(vocab_size) if draft_to_target is None else torch.tensor(draft_to_target)
        drafter = cls(
            bias_VVd=torch.zeros(vocab_size, len(ids)), draft_to_target_V=ids, confidence_V=torch.zeros(vocab_size)
        )
        drafter.compiled_head = CompiledHead(
            vocab_size=vocab_size,
            markov=None,
            confidence_X=None,
            draft_to_target_V=None if draft_to_target is None else ids,
        )
        return drafter

    def markov_state(self, num_requests: int) -> Tensor:
        return torch.zeros(num_requests, 1)

    def markov_bias(self, prev_ids_R: Tensor, hidden_RD: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        return self.bias_VVd[prev_ids_R], state + 1

    def confidence_logits(self, hidden_RD: Tensor, prev_ids_R: Tensor) -> Tensor:
        return self.confidence_V[prev_ids_R] + hidden_RD[:, 0]


def chi_square_p(counts: Sequence[int], expected: Sequence[float]) -> float:
    """P-value of counts under expected probabilities; a count where none is expected gives 0."""
    total = sum(counts)
    statistic, cells = 0.0, 0
    for count, probability in zip(counts, expected, strict=True):
        if probability == 0.0:
            if count:
                return 0.0
            continue
        cells += 1
        statistic += (count - total * probability) ** 2 / (total * probability)
    half = torch.tensor([(cells - 1) / 2, statistic / 2], dtype=torch.float64)
    return float(torch.special.gammaincc(half[0], half[1]))
