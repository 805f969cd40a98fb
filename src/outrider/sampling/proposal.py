"""Walking a drafter's block: one Markov step, one draw per slot, and the record of what each was drawn from.

The drafts go through the same temperature, filters, bias and penalties as the target's rows, each behind its own
prefix. That is no condition of exactness, which only asks that ``q_steps`` is what was sampled from; it raises
acceptance. With a reduced draft vocabulary everything happens on the draft's columns.

Shape legend: R requests, G draft slots, D hidden size, Vd draft vocabulary, V target vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from outrider.ops.compiled_head import CompiledHead
from outrider.sampling.processors import process
from outrider.sampling.random import Role, uniforms
from outrider.sampling.sampler import sample_at
from outrider.sampling.state import LogitRow


class SequentialHead(Protocol):
    """The part of a drafter that runs slot after slot."""

    @property
    def draft_to_target_V(self) -> Tensor:  # noqa: N802  (a shape suffix)
        """int64 [Vd]: the target's id of each draft id."""
        ...

    @property
    def compiled_head(self) -> CompiledHead | None:
        """What a compiled walk reads in place of the methods below; None: there is no such form of this head."""
        ...

    def markov_state(self, num_requests: int) -> Tensor: ...

    def markov_bias(self, prev_ids_R: Tensor, hidden_RD: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        """Bias [R, Vd] after the target ids ``prev_ids_R``, and the next state."""
        ...

    def confidence_logits(self, hidden_RD: Tensor, prev_ids_R: Tensor) -> Tensor:
        """One logit per request, [R]."""
        ...


@dataclass(frozen=True, slots=True)
class Proposal:
    """Drafts of R requests and the distributions they were drawn from."""

    draft_ids: tuple[tuple[int, ...], ...]  # target ids, per request
    q_steps: tuple[Tensor, ...]  # per slot fp32 [R, Vd], zeros at greedy rows; (): q is one at the draft itself
    draft_to_target: Tensor | None  # int64 [Vd]; None: draft ids are the first Vd target ids
    confidence_logits: Tensor  # fp32 [R, G], meaningful for the drafts of each request; [R, 0] without a head

    @staticmethod
    def one_hot(draft_ids: Sequence[Sequence[int]]) -> Proposal:
        """Drafts that were not drawn but determined, as by a look-up."""
        return Proposal(tuple(tuple(ids) for ids in draft_ids), (), None, torch.empty((len(draft_ids), 0)))


def propose(
    *,
    drafter: SequentialHead,
    base_logits_RGV: Tensor,
    hidden_RGD: Tensor,
    anchor_ids_R: Tensor,
    rows: Sequence[LogitRow],
    num_drafts_R: Sequence[int],
    confidence: bool,
) -> Proposal:
    """Draft up to ``num_drafts_R`` tokens per request.

    base_logits_RGV: fp32 [R, G, Vd]; hidden_RGD: what the heads read, [R, G, D]; anchor_ids_R: int64 [R]; rows: of
    each request's first draft (prefix ()). Slots behind the largest of ``num_drafts_R`` are not computed.
    """
    num_requests, num_slots, num_columns = base_logits_RGV.shape
    assert len(rows) == num_requests == len(num_drafts_R), "one row and one number of drafts per request"
    assert all(not row.prefix for row in rows), "the first draft has no draft ahead of it"
    depth = max(num_drafts_R, default=0)
    assert 0 <= depth <= num_slots, f"{depth} drafts asked of a block of {num_slots} slots"
    if depth == 0:
        return Proposal.one_hot([()] * num_requests)
    device = base_logits_RGV.device
    draft_to_target_V = drafter.draft_to_target_V
    identity = bool(torch.equal(draft_to_target_V, torch.arange(num_columns, device=device)))
    edits = any(row.state.edits_logits for row in rows)
    column_of_id = columns_of_ids(draft_to_target_V) if edits else None
    all_greedy = all(row.state.is_greedy for row in rows)
    uniform_GR = torch.empty((depth, 0)) if all_greedy else _propose_uniforms(rows, depth)

    state = drafter.markov_state(num_requests)
    prev_ids_R = anchor_ids_R
    prefixes: list[tuple[int, ...]] = [()] * num_requests
    drafts: list[Tensor] = []
    q_steps: list[Tensor] = []
    confidences: list[Tensor] = []
    for k in range(depth):
        hidden_RD = hidden_RGD[:, k]
        if confidence:
            confidences.append(drafter.confidence_logits(hidden_RD, prev_ids_R).float())
        bias_RV, state = drafter.markov_bias(prev_ids_R, hidden_RD, state)
        step_rows = [
            LogitRow(row.state, prefix, row.position + k, row.anchor_position)
            for row, prefix in zip(rows, prefixes, strict=True)
        ]
        # A drafter may be wrong, never fatal: NaN would make the draw fall outside the vocabulary.
        logits_RV = torch.nan_to_num(base_logits_RGV[:, k] + bias_RV)
        dist = process(logits_RV, step_rows, column_of_id=column_of_id)
        columns_R = sample_at(dist, uniform_GR[k])
        prev_ids_R = columns_R if identity else draft_to_target_V[columns_R]
        drafts.append(prev_ids_R)
        if not all_greedy:
            q_steps.append(dist.probs_NV)
        if edits:  # the next slot's history
            prefixes = [(*prefix, token_id) for prefix, token_id in zip(prefixes, prev_ids_R.tolist(), strict=True)]

    ids_RG = torch.stack(drafts, dim=1).tolist()
    return Proposal(
        draft_ids=tuple(tuple(ids[:n]) for ids, n in zip(ids_RG, num_drafts_R, strict=True)),
        q_steps=tuple(q_steps),
        draft_to_target=None if identity else draft_to_target_V,
        confidence_logits=torch.stack(confidences, dim=1) if confidence else torch.empty((num_requests, 0)),
    )


def columns_of_ids(draft_to_target_V: Tensor) -> Tensor:
    """The inverse map: draft column of every target id up to the largest drafted one, -1 where there is none."""
    size = int(draft_to_target_V.max()) + 1
    column_of_id = torch.full((size,), -1, dtype=torch.int64, device=draft_to_target_V.device)
    column_of_id[draft_to_target_V] = torch.arange(draft_to_target_V.shape[0], device=draft_to_target_V.device)
    return column_of_id


def _propose_uniforms(rows: Sequence[LogitRow], depth: int) -> Tensor:
    """Every slot's numbers at once, float64 [depth, R]."""
    return uniforms(
        seeds=[row.state.seed for _ in range(depth) for row in rows],
        positions=[row.position + k for k in range(depth) for row in rows],
        role=Role.PROPOSE,
        round_positions=[row.anchor_position for _ in range(depth) for row in rows],
    ).view(depth, len(rows))
