"""Which drafts become output, and the token behind them. This is where drafting is made lossless.

Left to right, a draft x of a sampled request is accepted with probability min(1, p(x) / q(x)), where p is the
target's distribution at that row and q the one x was drawn from. The first rejection emits a draw from
max(p - q, 0), normalised; if all drafts are accepted, the last row emits a draw from p. Either way every emitted
token has exactly the distribution p of its row, whatever q was (Leviathan et al. 2023, Chen et al. 2023), provided
the number of drafts kept did not depend on the drafts themselves. A greedy request accepts while the draft is the
argmax and then emits the argmax.

Accepting, recovering and drafting use separate random numbers (``random.Role``), each a function of the request's
own seed and positions.

Shape legend: N verify rows, D drafts to test, S sampled requests, V target vocabulary, Vd draft vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from outrider.sampling.processors import Distribution
from outrider.sampling.proposal import Proposal, columns_of_ids
from outrider.sampling.random import Role
from outrider.sampling.sampler import draw, row_uniforms, weights
from outrider.sampling.state import LogitRow


@dataclass(frozen=True, slots=True)
class Accepted:
    num_accepted: int  # drafts that became output
    token_ids: tuple[int, ...]  # those drafts and the one token behind them


@dataclass(frozen=True, slots=True)
class _Draft:
    """One draft under test; ``row`` is where its distribution stands."""

    request: int
    step: int
    row: int
    token_id: int


def accept(
    *, dist: Distribution, rows: Sequence[LogitRow], proposal: Proposal, widths: Sequence[int]
) -> list[Accepted]:
    """Emit 1..width tokens per request.

    dist, rows: the verify rows of all requests in request order, request r owning ``widths[r]`` of them: its anchor
    and the first widths[r] - 1 of its drafts. A width of 1 is plain sampling.
    """
    assert sum(widths) == len(rows), f"widths {list(widths)} must add up to the {len(rows)} rows"
    assert len(widths) == len(proposal.draft_ids), "one width per request"
    starts, start = [], 0
    for width in widths:
        starts.append(start)
        start += width
    greedy = [rows[start].state.is_greedy for start in starts]
    num_accepted = _accepted_lengths(dist, rows, proposal, widths, starts, greedy)

    last_rows = [start + n for start, n in zip(starts, num_accepted, strict=True)]
    last_ids: list[int] = dist.argmax_N[torch.tensor(last_rows, device=dist.argmax_N.device)].tolist()
    sampled = [r for r, is_greedy in enumerate(greedy) if not is_greedy]
    if sampled:
        rejected = [num_accepted[r] < widths[r] - 1 for r in sampled]
        for r, token_id in zip(
            sampled,
            _last_tokens(dist, rows, proposal, sampled, [last_rows[r] for r in sampled], rejected, num_accepted),
            strict=True,
        ):
            last_ids[r] = token_id
    return [
        Accepted(n, (*ids[:n], last_id))
        for n, ids, last_id in zip(num_accepted, proposal.draft_ids, last_ids, strict=True)
    ]


def _accepted_lengths(
    dist: Distribution,
    rows: Sequence[LogitRow],
    proposal: Proposal,
    widths: Sequence[int],
    starts: Sequence[int],
    greedy: Sequence[bool],
) -> list[int]:
    """Drafts accepted of each request: those ahead of its first rejection."""
    drafts = [
        _Draft(r, k, starts[r] + k, proposal.draft_ids[r][k])
        for r, width in enumerate(widths)
        for k in range(width - 1)
    ]
    sampled = [draft for draft in drafts if not greedy[draft.request]]
    passed: dict[int, bool] = {}  # by row
    if len(sampled) < len(drafts):
        argmax = dist.argmax_N.tolist()
        passed = {draft.row: argmax[draft.row] == draft.token_id for draft in drafts if greedy[draft.request]}
    if sampled:
        device = dist.probs_NV.device
        row_D = torch.tensor([draft.row for draft in sampled], device=device)
        id_D = torch.tensor([draft.token_id for draft in sampled], device=device)
        p_D = dist.probs_NV[row_D, id_D].double()
        q_D = _draft_probs(proposal, sampled, id_D)
        uniform_D = row_uniforms([rows[draft.row] for draft in sampled], Role.ACCEPT).to(device)
        hits = (uniform_D * q_D < p_D).tolist()  # u < p / q
        passed.update((draft.row, hit) for draft, hit in zip(sampled, hits, strict=True))
    lengths = []
    for start, width in zip(starts, widths, strict=True):
        n = 0
        while n < width - 1 and passed[start + n]:
            n += 1
        lengths.append(n)
    return lengths


def _draft_probs(proposal: Proposal, drafts: Sequence[_Draft], id_D: Tensor) -> Tensor:
    """q of each draft, float64 [D]."""
    q_D = torch.ones(len(drafts), dtype=torch.float64, device=id_D.device)
    if not proposal.q_steps:
        return q_D
    column_D = id_D if proposal.draft_to_target is None else columns_of_ids(proposal.draft_to_target)[id_D]
    request_D = torch.tensor([draft.request for draft in drafts], device=id_D.device)
    for step, q_RV in enumerate(proposal.q_steps):
        at_step = [d for d, draft in enumerate(drafts) if draft.step == step]
        if at_step:
            index = torch.tensor(at_step, device=id_D.device)
            q_D[index] = q_RV[request_D[index], column_D[index]].double()
    return q_D


def _last_tokens(
    dist: Distribution,
    rows: Sequence[LogitRow],
    proposal: Proposal,
    requests: Sequence[int],
    last_rows: Sequence[int],
    rejected: Sequence[bool],
    num_accepted: Sequence[int],
) -> list[int]:
    """The token behind the accepted drafts of each of S sampled requests; ``last_rows`` is where it is drawn."""
    device = dist.probs_NV.device
    probs_SV = dist.probs_NV[torch.tensor(last_rows, device=device)].double()
    lost = [s for s, is_rejected in enumerate(rejected) if is_rejected]
    if lost:
        index = torch.tensor(lost, device=device)
        residual_LV = probs_SV[index]
        _subtract_draft(residual_LV, proposal, [requests[s] for s in lost], [num_accepted[requests[s]] for s in lost])
        residual_LV.clamp_min_(0.0)
        # Too little mass to draw from means that p and q are equal but for rounding; p is then as good.
        has_mass_L1 = (weights(residual_LV).sum(-1) > 0)[:, None]
        probs_SV[index] = torch.where(has_mass_L1, residual_LV, probs_SV[index])
    roles = [Role.RECOVER if is_rejected else Role.TARGET for is_rejected in rejected]
    uniform_S = row_uniforms([rows[n] for n in last_rows], roles)
    token_ids: list[int] = draw(probs_SV, uniform_S).tolist()
    return token_ids


def _subtract_draft(probs_LV: Tensor, proposal: Proposal, requests: Sequence[int], steps: Sequence[int]) -> None:
    """Subtract in place, from row l, the q that draft ``steps[l]`` of ``requests[l]`` was drawn from."""
    device = probs_LV.device
    if not proposal.q_steps:
        ids = [proposal.draft_ids[r][step] for r, step in zip(requests, steps, strict=True)]
        probs_LV[torch.arange(len(ids), device=device), torch.tensor(ids, device=device)] = 0.0
        return
    for step, q_RV in enumerate(proposal.q_steps):
        at_step = [i for i, s in enumerate(steps) if s == step]
        if not at_step:
            continue
        index = torch.tensor(at_step, device=device)
        q_SV = q_RV[torch.tensor([requests[i] for i in at_step], device=device)].double()
        if proposal.draft_to_target is None:
            probs_LV[index, : q_SV.shape[1]] -= q_SV
        else:
            probs_LV[index[:, None], proposal.draft_to_target[None, :]] -= q_SV
