"""What sampling knows of a sequence, and of one row of logits.

``SequenceState`` holds what has been emitted and grows only through ``append``; drafts never enter it. A draft that a
row lies behind is in that row's ``prefix``: a row's own history is prompt + output + prefix.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from outrider.sampling_params import SamplingParams


class SequenceState:
    """One per sequence (a request with n > 1 has n of them)."""

    __slots__ = (
        "_counts",
        "_output_token_ids",
        "banned_token_ids",
        "bias_items",
        "eos_token_ids",
        "filters",
        "has_penalties",
        "is_greedy",
        "params",
        "prompt_token_ids",
        "seed",
    )

    def __init__(
        self, *, params: SamplingParams, seed: int, prompt_token_ids: Sequence[int], eos_token_ids: Collection[int]
    ) -> None:
        self.params = params
        self.seed = seed % 2**64
        self.prompt_token_ids = tuple(prompt_token_ids)
        self.eos_token_ids = frozenset(eos_token_ids)
        self._output_token_ids: list[int] = []
        # Fixed by params and read for every row of every pass.
        self.is_greedy = params.is_greedy
        self.filters = params.top_k > 0 or params.top_p < 1.0 or params.min_p > 0.0
        self.bias_items = tuple(params.logit_bias.items())
        self.banned_token_ids = tuple(sorted(self.eos_token_ids | set(params.stop_token_ids)))  # until min_tokens
        self.has_penalties = (
            params.repetition_penalty != 1.0 or params.frequency_penalty != 0.0 or params.presence_penalty != 0.0
        )
        # Token id -> times emitted; 0 marks a token of the prompt alone. Kept only where a penalty reads it.
        self._counts: dict[int, int] | None = dict.fromkeys(self.prompt_token_ids, 0) if self.has_penalties else None

    @property
    def output_token_ids(self) -> Sequence[int]:
        """Tokens emitted so far, oldest first."""
        return self._output_token_ids

    @property
    def penalty_counts(self) -> dict[int, int]:
        """Times emitted of every token of prompt (0) and output, without any prefix; only with a penalty on."""
        assert self._counts is not None, "counts are kept only for sequences with a penalty"
        return self._counts

    @property
    def edits_logits(self) -> bool:
        """Whether a row of this sequence needs its logits changed before temperature."""
        return self.has_penalties or bool(self.bias_items) or len(self._output_token_ids) < self.params.min_tokens

    def append(self, token_ids: Sequence[int]) -> None:
        """Commit emitted tokens."""
        self._output_token_ids.extend(token_ids)
        counts = self._counts
        if counts is not None:
            for token_id in token_ids:
                counts[token_id] = counts.get(token_id, 0) + 1


@dataclass(frozen=True, slots=True)
class LogitRow:
    """One row of logits to sample from.

    ``anchor_position`` names the round, so that a position drafted again in a later round draws afresh; for a token
    sampled without drafting (prefill) it is ``position - 1``.
    """

    state: SequenceState
    prefix: tuple[int, ...]  # this round's drafts ahead of the row
    position: int  # absolute position of the token to be sampled
    anchor_position: int
