"""What the engine asks of a proposer, and the two that need no model: none and prompt lookup.

A proposer sees every decoding request of the step, in the order of the verify pass, and answers for each with at most
``num_drafts`` tokens and the distribution they were really drawn from. It may look at nothing but committed tokens and
its own context, so that whatever it proposes the output stays the target's.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from outrider.batch.step_plan import PassPlan, StepPlan
from outrider.sampling.proposal import Proposal
from outrider.sampling.state import LogitRow
from outrider.spec_decode.prompt_lookup import find_continuation


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftRequest:
    """One decoding request: its anchor at position p, and room for ``num_drafts`` drafts behind it."""

    row: LogitRow  # of the first draft: prefix (), position p + 1, anchor position p
    anchor_id: int
    block_ids: Sequence[int]
    num_drafts: int


class Proposer(Protocol):
    @property
    def num_speculative_tokens(self) -> int:
        """Drafts per request and round, at most; 0 turns drafting off."""
        ...

    @property
    def draft_width(self) -> int:
        """Rows per request of its draft pass; 0: it runs no pass."""
        ...

    @property
    def tap_layer_ids(self) -> tuple[int, ...]:
        """Target layers whose outputs it needs of every committed position; without any it keeps no context."""
        ...

    def capture(self, plan: PassPlan) -> None:
        """Capture the tier of ``plan``, which has no real rows; called only of a proposer with a pass."""
        ...

    def propose(self, plan: StepPlan, requests: Sequence[DraftRequest]) -> Proposal:
        """A rank without requests calls it too, with none: the pass may cross data-parallel ranks."""
        ...

    def write_context(self, *, taps_NF: Tensor, positions_N: Tensor, slots_N: Tensor) -> None:
        """Take in committed positions: tapped features [N, F], positions and slots int64 [N].

        Called only of a proposer with tapped layers.
        """
        ...


class NoProposer:
    """Plain decoding: every verify window is the anchor alone."""

    num_speculative_tokens = 0
    draft_width = 0
    tap_layer_ids: tuple[int, ...] = ()

    def capture(self, plan: PassPlan) -> None:
        raise AssertionError("plain decoding runs no draft pass")

    def propose(self, plan: StepPlan, requests: Sequence[DraftRequest]) -> Proposal:
        return Proposal.one_hot([()] * len(requests))

    def write_context(self, *, taps_NF: Tensor, positions_N: Tensor, slots_N: Tensor) -> None:
        """It has no context."""


class PromptLookupProposer:
    """Drafts copied from the sequence itself; see ``prompt_lookup``."""

    draft_width = 0
    tap_layer_ids: tuple[int, ...] = ()

    def __init__(self, *, num_speculative_tokens: int, max_ngram: int, min_ngram: int) -> None:
        self.num_speculative_tokens = num_speculative_tokens
        self._max_ngram = max_ngram
        self._min_ngram = min_ngram

    def capture(self, plan: PassPlan) -> None:
        raise AssertionError("prompt lookup runs no draft pass")

    def propose(self, plan: StepPlan, requests: Sequence[DraftRequest]) -> Proposal:
        return Proposal.one_hot([self._lookup(request) for request in requests])

    def _lookup(self, request: DraftRequest) -> tuple[int, ...]:
        state = request.row.state
        return tuple(
            find_continuation(
                [*state.prompt_token_ids, *state.output_token_ids],
                max_ngram=self._max_ngram,
                min_ngram=self._min_ngram,
                num_tokens=request.num_drafts,
            )
        )

    def write_context(self, *, taps_NF: Tensor, positions_N: Tensor, slots_N: Tensor) -> None:
        """The sequence itself is its context."""
