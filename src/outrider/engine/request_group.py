"""What a caller asked for: one prompt and n sequences of it, and the snapshots handed back.

The scheduler knows sequences only; here they meet again. Times are ``time.perf_counter`` seconds.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from outrider.engine.sequence import Sequence
from outrider.outputs import CompletionOutput, RequestOutput, RequestTiming, SpecCounters
from outrider.sampling_params import SamplingParams
from outrider.spec_decode.counters import merge_counters


@dataclass(slots=True, kw_only=True)
class RequestGroup:
    request_id: str
    prompt: str | None
    prompt_token_ids: tuple[int, ...]
    params: SamplingParams
    arrival_time: float
    sequences: list[Sequence] = field(default_factory=list)
    first_scheduled_time: float = 0.0
    first_token_time: float = 0.0

    @property
    def finished(self) -> bool:
        return all(sequence.finish_reason is not None for sequence in self.sequences)

    def note_scheduled(self) -> None:
        if not self.first_scheduled_time:
            self.first_scheduled_time = time.perf_counter()

    def note_token(self) -> None:
        if not self.first_token_time:
            self.first_token_time = time.perf_counter()

    def output(self) -> RequestOutput:
        """A snapshot of now."""
        finished = self.finished
        return RequestOutput(
            request_id=self.request_id,
            prompt=self.prompt,
            prompt_token_ids=self.prompt_token_ids,
            outputs=tuple(_completion(sequence) for sequence in self.sequences),
            finished=finished,
            num_cached_tokens=max(sequence.request.num_cached_tokens for sequence in self.sequences),
            timing=RequestTiming(
                queue_s=self._since_arrival(self.first_scheduled_time),
                ttft_s=self._since_arrival(self.first_token_time),
                e2e_s=time.perf_counter() - self.arrival_time if finished else 0.0,
            ),
            spec=self._spec(),
        )

    def _since_arrival(self, moment: float) -> float:
        return moment - self.arrival_time if moment else 0.0

    def _spec(self) -> SpecCounters:
        return merge_counters(sequence.spec.snapshot() for sequence in self.sequences)


def _completion(sequence: Sequence) -> CompletionOutput:
    return CompletionOutput(
        index=sequence.index,
        text=sequence.text,
        token_ids=tuple(sequence.state.output_token_ids),
        logprobs=tuple(sequence.logprobs) if sequence.params.logprobs is not None else None,
        finish_reason=sequence.finish_reason,
        stop_reason=sequence.stop_reason,
        error=sequence.error,
    )
