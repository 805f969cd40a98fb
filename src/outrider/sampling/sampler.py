"""One draw per row, and log-probabilities.

A draw inverts the cumulative distribution at one uniform number. Weights become 52-bit integers first: their sums
are exact in any order, so every device finds the same token, and a token of zero probability is never drawn however
close to 1 the number is.

Shape legend: N rows, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from outrider.sampling.filters import ordered_candidates
from outrider.sampling.processors import Distribution
from outrider.sampling.random import Role, uniforms
from outrider.sampling.state import LogitRow

_WEIGHT_SCALE = 2.0**52
_CHUNK_ELEMENTS = 1 << 17


@dataclass(frozen=True, slots=True)
class RankedLogprob:
    token_id: int
    logprob: float
    rank: int  # 1 = most likely; equal logprobs rank by token id


@dataclass(frozen=True, slots=True)
class RawLogprobs:
    """Log-probabilities of one emitted token under the raw logits."""

    token_id: int
    logprob: float
    rank: int
    top: tuple[RankedLogprob, ...]  # most likely first; may repeat the token itself


def sample_at(dist: Distribution, uniform_N: Tensor) -> Tensor:
    """One token per row, int64 [N]: the argmax of greedy rows, a draw of the others at their uniform numbers."""
    if dist.probs_NV.shape[0] == 0:
        return dist.argmax_N
    sampled = ~dist.greedy_N
    if bool(sampled.all()):
        return draw(dist.probs_NV, uniform_N)
    rows_S = sampled.nonzero()[:, 0]
    device_rows_S = rows_S.to(dist.probs_NV.device)
    token_ids_N = dist.argmax_N.clone()
    token_ids_N[device_rows_S] = draw(dist.probs_NV[device_rows_S], uniform_N[rows_S])
    return token_ids_N


def row_uniforms(rows: Sequence[LogitRow], role: Role | Sequence[Role]) -> Tensor:
    """The numbers of the rows in this role, float64 [N]."""
    return uniforms(
        seeds=[row.state.seed for row in rows],
        positions=[row.position for row in rows],
        role=role,
        round_positions=[row.anchor_position for row in rows],
    )


def weights(probs_NV: Tensor) -> Tensor:
    """Integer weights proportional to probabilities (fp32 or float64, each at most about 1)."""
    return (probs_NV.double() * _WEIGHT_SCALE).long()


def draw(probs_NV: Tensor, uniform_N: Tensor) -> Tensor:
    """Invert the cumulative probabilities at uniform numbers in [0, 1); int64 [N]. Rows need not sum to exactly 1."""
    num_rows, vocab_size = probs_NV.shape
    uniform_N = uniform_N.to(probs_NV.device)
    # On a CPU a few rows at a time: their 8-byte temporaries stay in cache.
    step = max(1, _CHUNK_ELEMENTS // vocab_size) if probs_NV.device.type == "cpu" else max(1, num_rows)
    chunks = [slice(start, start + step) for start in range(0, num_rows, step)]
    return torch.cat([_draw(probs_NV[chunk], uniform_N[chunk]) for chunk in chunks])


def _draw(probs_NV: Tensor, uniform_N: Tensor) -> Tensor:
    cumulative_NV = weights(probs_NV).cumsum(-1)
    total_N = cumulative_NV[:, -1]
    target_N = torch.minimum((uniform_N * total_N.double()).long(), total_N - 1)
    # The first token whose cumulative weight exceeds the target has a weight above zero itself.
    token_ids_N = torch.searchsorted(cumulative_NV, target_N[:, None], right=True)[:, 0]
    return token_ids_N.clamp_(max=probs_NV.shape[1] - 1)  # a row of NaN still gives an id: its mates go on


def compute_logprobs(logits_NV: Tensor, token_ids_N: Tensor, num_top: Sequence[int]) -> list[RawLogprobs]:
    """Log-probabilities of ``token_ids_N`` and of each row's ``num_top`` most likely tokens, from raw fp32 logits."""
    num_rows = logits_NV.shape[0]
    assert token_ids_N.shape[0] == len(num_top) == num_rows, "one token and one number of tops per row"
    if num_rows == 0:
        return []
    logprobs_NV = logits_NV.log_softmax(-1)
    own_N1 = token_ids_N[:, None].to(logits_NV.device)
    logit_N1 = logits_NV.gather(1, own_N1)
    earlier_NV = torch.arange(logits_NV.shape[1], device=logits_NV.device) < own_N1
    before_NV = (logits_NV > logit_N1) | ((logits_NV == logit_N1) & earlier_NV)
    ranks = (1 + before_NV.sum(-1)).tolist()
    own = logprobs_NV.gather(1, own_N1)[:, 0].tolist()
    tops = _top_logprobs(logits_NV, logprobs_NV, num_top)
    return [
        RawLogprobs(token_id, logprob, rank, top)
        for token_id, logprob, rank, top in zip(token_ids_N.tolist(), own, ranks, tops, strict=True)
    ]


def _top_logprobs(logits_NV: Tensor, logprobs_NV: Tensor, num_top: Sequence[int]) -> list[tuple[RankedLogprob, ...]]:
    most = min(max(num_top), logits_NV.shape[1])
    if most == 0:
        return [()] * len(num_top)
    _, ids_NK, known_N = ordered_candidates(logits_NV, most + 1)
    if bool((known_N < most).any()):  # ties at the cut: the full order says which of them come first
        ids_NK = ordered_candidates(logits_NV, logits_NV.shape[1])[1][:, :most]
    values = logprobs_NV.gather(1, ids_NK).tolist()
    return [
        tuple(
            RankedLogprob(i, v, k + 1) for k, (i, v) in enumerate(zip(row_ids[:k_top], row_values[:k_top], strict=True))
        )
        for row_ids, row_values, k_top in zip(ids_NK.tolist(), values, num_top, strict=True)
    ]
