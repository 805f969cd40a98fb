"""The three forward batches. Each is built by exactly one method of ``runner.batch_builder`` from a ``PassPlan``.

No field is optional and nothing is assigned later: a batch without its request counts or its non-padded token count
does not type-check, let alone run. Consumers ``match`` on the union and end in ``assert_never``. An idle rank holds the
same class with zero real requests.

What a model's forward reads of a batch is its ``inputs``: tensors and what must not change between replays of a graph.
Counts of real rows are not among them, but for the tensor that experts read, so that nothing of one step can be baked
into a graph and found there by the next.

Shape legend: N padded rows, R padded requests, K rows that need logits.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from outrider.batch.attention_metadata import BlockMetadata, CausalMetadata
from outrider.batch.counts import RequestCount, TokenCount
from outrider.batch.expert_metadata import ExpertMetadata
from outrider.batch.step_plan import PassKind, PassPlan


def _check(plan: PassPlan, kind: PassKind, rank: int, requests: RequestCount, tokens: TokenCount) -> None:
    assert plan.kind is kind, f"a {kind} batch needs the plan of a {kind} pass, not {plan.kind}"
    assert requests == plan.requests[rank], f"{kind}: {requests} differs from the plan's {plan.requests[rank]}"
    assert tokens <= plan.tokens[rank], f"{kind}: {tokens} exceeds the plan's {plan.tokens[rank]}"


def _check_non_padded(num_tokens_non_padded: Tensor, tokens: TokenCount) -> None:
    assert num_tokens_non_padded.dtype == torch.int32, "the non-padded token count is an int32 tensor"
    assert num_tokens_non_padded.tolist() == [tokens.value], f"{num_tokens_non_padded} differs from {tokens}"


@dataclass(frozen=True, slots=True, kw_only=True)
class TargetInputs:
    """What the target's forward reads of a prefill or verify pass."""

    token_ids_N: Tensor  # int64 [N]
    positions_N: Tensor  # int64 [N]
    metadata: CausalMetadata
    experts: ExpertMetadata


@dataclass(frozen=True, slots=True, kw_only=True)
class DrafterInputs:
    """What the drafter's forward reads of a draft pass."""

    anchor_ids_R: Tensor  # int64 [R]
    anchor_positions_R: Tensor  # int64 [R]
    metadata: BlockMetadata
    experts: ExpertMetadata


PassInputs = TargetInputs | DrafterInputs


@dataclass(frozen=True, slots=True, kw_only=True)
class _TargetBatch:
    """What prefill and verify batches have alike: ragged rows of the target."""

    plan: PassPlan
    rank: int
    requests: RequestCount
    tokens: TokenCount
    num_tokens_non_padded: Tensor  # int32 [1]
    token_ids_N: Tensor  # int64 [N]
    positions_N: Tensor  # int64 [N]
    metadata: CausalMetadata
    experts: ExpertMetadata

    @property
    def inputs(self) -> TargetInputs:
        return TargetInputs(
            token_ids_N=self.token_ids_N,
            positions_N=self.positions_N,
            metadata=self.metadata,
            experts=self.experts,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillBatch(_TargetBatch):
    """Prompt chunks through the target; the rows' draft context is written in the same step."""

    logit_rows_K: Tensor  # int64 [K], the last row of every chunk that is sampled

    def __post_init__(self) -> None:
        _check(self.plan, PassKind.PREFILL, self.rank, self.requests, self.tokens)
        _check_non_padded(self.num_tokens_non_padded, self.tokens)
        assert self.logit_rows_K.numel() == self.plan.logit_rows[self.rank], "logit rows differ from the plan"


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftBatch:
    """Blocks [anchor, mask, ...] through the drafter."""

    plan: PassPlan
    rank: int
    requests: RequestCount
    tokens: TokenCount
    num_tokens_non_padded: Tensor  # int32 [1]
    anchor_ids_R: Tensor  # int64 [R]
    anchor_positions_R: Tensor  # int64 [R]
    metadata: BlockMetadata
    experts: ExpertMetadata

    def __post_init__(self) -> None:
        _check(self.plan, PassKind.DRAFT, self.rank, self.requests, self.tokens)
        _check_non_padded(self.num_tokens_non_padded, self.tokens)
        assert self.tokens == self.requests.tokens(width=self.plan.width), "a draft block is never cut"

    @property
    def inputs(self) -> DrafterInputs:
        return DrafterInputs(
            anchor_ids_R=self.anchor_ids_R,
            anchor_positions_R=self.anchor_positions_R,
            metadata=self.metadata,
            experts=self.experts,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class VerifyBatch(_TargetBatch):
    """Anchors and kept drafts through the target, ragged; every row needs logits."""

    def __post_init__(self) -> None:
        _check(self.plan, PassKind.VERIFY, self.rank, self.requests, self.tokens)
        _check_non_padded(self.num_tokens_non_padded, self.tokens)
        assert self.metadata.max_query_len <= self.plan.width, "a verify window is wider than the pass"


ForwardBatch = PrefillBatch | DraftBatch | VerifyBatch
