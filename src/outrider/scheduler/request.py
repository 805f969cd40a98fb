"""One request (one choice of it) as the scheduler sees it: tokens, frontier, blocks, status.

Invariant: ``num_computed_tokens`` is the target-KV frontier and the draft-context frontier at once. A decoding request
has computed all of its tokens but the last, its anchor.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING

from outrider.outputs import FinishReason
from outrider.scheduler.admission import max_total_tokens

if TYPE_CHECKING:
    from outrider.sampling_params import SamplingParams


class RequestStatus(Enum):
    WAITING = "waiting"  # never ran
    RUNNING = "running"  # owns blocks; prefilling or decoding
    PREEMPTED = "preempted"  # ran, lost its blocks, waits to run again
    FINISHED = "finished"


@dataclass(slots=True, kw_only=True, eq=False)
class Request:
    """Made by ``Request.create``; changed by the scheduler alone (``commit``, ``finish``, ``schedule``)."""

    request_id: str
    prompt_token_ids: tuple[int, ...]
    params: SamplingParams
    arrival_time: float
    max_total_tokens: int  # prompt and output together: the request ends with "length" when it has so many
    output_token_ids: list[int] = field(default_factory=list)
    num_computed_tokens: int = 0
    block_ids: list[int] = field(default_factory=list)
    status: RequestStatus = RequestStatus.WAITING
    finish_reason: FinishReason | None = None
    num_preemptions: int = 0
    num_cached_tokens: int = 0  # prompt tokens served from the prefix cache
    arrival_index: int = -1  # seniority, given by Scheduler.add; smaller is older
    last_turn: int = -1  # when it last got a decode row; the smallest goes first where the budget is short

    @classmethod
    def create(
        cls,
        *,
        request_id: str,
        prompt_token_ids: tuple[int, ...],
        params: SamplingParams,
        arrival_time: float,
        max_model_len: int,
    ) -> Request:
        """A waiting request, its length clamped to the context limit; ``Scheduler.add`` says whether it can run."""
        return cls(
            request_id=request_id,
            prompt_token_ids=prompt_token_ids,
            params=params,
            arrival_time=arrival_time,
            max_total_tokens=max_total_tokens(
                params, num_prompt_tokens=len(prompt_token_ids), max_model_len=max_model_len
            ),
        )

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.prompt_token_ids)

    @property
    def num_tokens(self) -> int:
        """Committed length: prompt and output, the anchor included."""
        return len(self.prompt_token_ids) + len(self.output_token_ids)

    @property
    def prefill_end(self) -> int:
        """Tokens to compute before decoding: the prompt, or after a preemption everything but the anchor."""
        return self.num_tokens - 1 if self.output_token_ids else len(self.prompt_token_ids)

    @property
    def is_decoding(self) -> bool:
        return bool(self.output_token_ids) and self.num_computed_tokens == self.num_tokens - 1

    @property
    def needs_drafts(self) -> bool:
        """Whether its tokens depend on what was drafted: sampled ones do, and a seed of its own promises them again."""
        return self.params.seed is not None and not self.params.is_greedy

    @property
    def is_finished(self) -> bool:
        return self.status is RequestStatus.FINISHED

    @property
    def anchor(self) -> int:
        """The last emitted token; its position is ``num_tokens - 1``."""
        assert self.output_token_ids, f"request {self.request_id} has no output and so no anchor"
        return self.output_token_ids[-1]

    def tokens_between(self, start: int, stop: int) -> tuple[int, ...]:
        """Tokens at positions ``start .. stop - 1`` of prompt and output."""
        num_prompt = len(self.prompt_token_ids)
        assert 0 <= start <= stop <= self.num_tokens, (start, stop, self.num_tokens)
        output = self.output_token_ids[max(start - num_prompt, 0) : max(stop - num_prompt, 0)]
        return self.prompt_token_ids[start:stop] + tuple(output)
