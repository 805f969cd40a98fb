"""min-p, top-k and top-p on the few tokens that matter, with the meaning of a full sort.

Order the vocabulary by (logit descending, token id ascending): each filter keeps a prefix of that order, so one
length per row says it all.
* min-p keeps tokens whose probability is at least min_p times the largest;
* top-k keeps the first top_k of those, exactly: among equal logits the lower ids;
* top-p keeps the shortest prefix whose mass reaches top_p of what is left, at least one token.
That is vLLM's order. Comparisons with min_p and top_p allow SLACK, so that a mass equal to top_p on paper is not
missed by rounding.

Only the first candidates are ordered (``torch.topk``); rows for which they turn out too few get a full sort. How
many a row gets depends on its own parameters alone, and every reduction is within one row, so a row's result does
not depend, to the bit, on its batch mates.

Shape legend: M rows that filter, V vocabulary, K candidates.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from outrider.sampling_params import SamplingParams

SLACK = 1e-6
_WIDTHS = (128, 1024, 8192)  # numbers of candidates tried before the full sort


def filter_probs(logits_MV: Tensor, params: Sequence[SamplingParams]) -> Tensor:
    """Probabilities after filtering, fp32 [M, V]; the logits already carry the temperature."""
    vocab_size = logits_MV.shape[1]
    probs_MV = logits_MV.softmax(-1)
    out_MV = torch.zeros_like(probs_MV)
    pending = list(range(len(params)))
    for width in [w for w in _WIDTHS if w < vocab_size]:
        now = [i for i in pending if params[i].top_k < width]
        later = [i for i in pending if params[i].top_k >= width]
        pending = later + _filter_rows(logits_MV, probs_MV, out_MV, now, params, num_candidates=width)
    _filter_rows(logits_MV, probs_MV, out_MV, pending, params, num_candidates=vocab_size)
    return out_MV


def _filter_rows(
    logits_MV: Tensor,
    probs_MV: Tensor,
    out_MV: Tensor,
    indices: list[int],
    params: Sequence[SamplingParams],
    *,
    num_candidates: int,
) -> list[int]:
    """Fill ``out_MV`` at the rows ``indices``; returns those whose kept prefix the candidates do not determine."""
    if not indices:
        return []
    vocab_size, device = logits_MV.shape[1], logits_MV.device
    rows = torch.tensor(indices, device=device)
    some = len(indices) < logits_MV.shape[0]
    values_MK, ids_MK, known_M = ordered_candidates(logits_MV[rows] if some else logits_MV, num_candidates)
    probs_MK = (probs_MV[rows] if some else probs_MV).gather(1, ids_MK)
    mass_MK = probs_MK.double().cumsum(-1)

    kept_M = torch.full_like(known_M, vocab_size)
    min_ps = [params[i].min_p for i in indices]
    if any(min_ps):
        log_min_p = [math.log(p) - SLACK if p > 0.0 else -math.inf for p in min_ps]
        floor_M1 = values_MK[:, :1].double() + torch.tensor(log_min_p, dtype=torch.float64, device=device)[:, None]
        bounded_M = torch.tensor([p > 0.0 for p in min_ps], device=device)
        kept_M = torch.where(bounded_M, (values_MK.double() >= floor_M1).sum(-1), kept_M)
    top_ks = [min(params[i].top_k, vocab_size) if params[i].top_k > 0 else vocab_size for i in indices]
    kept_M = torch.minimum(kept_M, torch.tensor(top_ks, device=device))
    unbounded_M = kept_M == vocab_size  # neither min-p nor top-k drops anything: the whole mass is 1
    determined_M = unbounded_M | (kept_M <= known_M)

    top_ps = [params[i].top_p for i in indices]
    if min(top_ps) < 1.0:
        total_M = torch.where(unbounded_M, 1.0, _mass_of_prefix(mass_MK, kept_M))
        limit_M = (torch.tensor(top_ps, dtype=torch.float64, device=device) - SLACK) * total_M
        nucleus_M = 1 + (mass_MK[:, :-1] < limit_M[:, None]).sum(-1)
        limited_M = torch.tensor([p < 1.0 for p in top_ps], device=device)
        kept_M = torch.where(limited_M, torch.minimum(kept_M, nucleus_M), kept_M)
    determined_M = determined_M & (kept_M <= known_M)

    keep_MK = torch.arange(ids_MK.shape[1], device=device) < kept_M[:, None]
    kept_probs_MK = torch.where(keep_MK, probs_MK / _mass_of_prefix(mass_MK, kept_M)[:, None], 0.0).float()
    out_MV[rows[determined_M][:, None], ids_MK[determined_M]] = kept_probs_MK[determined_M]
    done = determined_M.tolist()
    return [i for i, finished in zip(indices, done, strict=True) if not finished]


def _mass_of_prefix(mass_MK: Tensor, length_M: Tensor) -> Tensor:
    """Cumulative mass of the first ``length_M`` candidates (all of them where it asks for more), [M]."""
    last_M1 = (length_M.clamp(max=mass_MK.shape[1]) - 1)[:, None]
    return mass_MK.gather(1, last_M1)[:, 0]


def ordered_candidates(logits_MV: Tensor, num_candidates: int) -> tuple[Tensor, Tensor, Tensor]:
    """The first tokens in (logit descending, id ascending) order: values [M, K], ids [M, K], known [M].

    The first ``known`` of a row are those of the full order. The others equal the last candidate: topk picks any of
    equals, so the full order may continue with other ids. Hence known < K unless K is the whole vocabulary.
    """
    num_rows, vocab_size = logits_MV.shape
    if num_candidates >= vocab_size:
        values_MV, ids_MV = logits_MV.sort(dim=-1, descending=True, stable=True)
        return values_MV, ids_MV, torch.full((num_rows,), vocab_size, device=logits_MV.device)
    values_MK, ids_MK = logits_MV.topk(num_candidates, dim=-1)
    if bool((values_MK[:, 1:] == values_MK[:, :-1]).any()):
        ids_MK, by_id_MK = ids_MK.sort(dim=-1)
        values_MK, by_value_MK = values_MK.gather(1, by_id_MK).sort(dim=-1, descending=True, stable=True)
        ids_MK = ids_MK.gather(1, by_value_MK)
    return values_MK, ids_MK, (values_MK > values_MK[:, -1:]).sum(-1)
