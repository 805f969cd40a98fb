"""One sequence while it lives: its sampling state, its text, and the one place where its stop events are found.

``take`` receives what a pass may emit and answers how much of it is output: the first stop event, by token, length or
text, wins, and nothing behind it reaches token ids, text, logprobs, penalties or counters.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq

from outrider.models.tokenizer import IncrementalDetokenizer, Tokenizer
from outrider.outputs import FinishReason, PositionLogprobs, TokenLogprob
from outrider.sampling.sampler import RawLogprobs
from outrider.sampling.state import SequenceState
from outrider.sampling.stop import StopStringMatcher, check_stop
from outrider.sampling_params import SamplingParams
from outrider.scheduler.request import Request
from outrider.spec_decode.counters import SpecAccumulator


class Sequence:
    """Owned by the engine core from arrival to end; the scheduler's ``Request`` is its other half."""

    __slots__ = (
        "_detokenizer",
        "_matcher",
        "_num_counted_prompt_tokens",
        "_tokenizer",
        "error",
        "finish_reason",
        "index",
        "logprobs",
        "params",
        "request",
        "spec",
        "state",
        "stop_reason",
        "text",
    )

    def __init__(
        self, *, index: int, request: Request, seed: int, tokenizer: Tokenizer, eos_token_ids: tuple[int, ...]
    ) -> None:
        self.index = index
        self.request = request
        self.params: SamplingParams = request.params
        self.state = SequenceState(
            params=self.params,
            seed=seed,
            prompt_token_ids=request.prompt_token_ids,
            eos_token_ids=eos_token_ids,
        )
        self.spec = SpecAccumulator()
        self.text = ""
        self.logprobs: list[PositionLogprobs] = []
        self.finish_reason: FinishReason | None = None
        self.stop_reason: int | str | None = None
        self.error: str | None = None
        self._num_counted_prompt_tokens = 0
        self._tokenizer = tokenizer
        self._detokenizer = IncrementalDetokenizer(tokenizer, skip_special_tokens=self.params.skip_special_tokens)
        self._matcher = (
            StopStringMatcher(
                self.params.stop,
                include_stop_str=self.params.include_stop_str_in_output,
                min_tokens=self.params.min_tokens,
            )
            if self.params.stop
            else None
        )

    def take(self, token_ids: Seq[int], logprobs: Seq[RawLogprobs]) -> int:
        """Make tokens output, up to the first stop event; returns how many. ``finish_reason`` is set if they end it.

        logprobs: one entry a token where the request asked for them, else empty.
        """
        assert self.finish_reason is None, "the sequence has ended"
        check = check_stop(
            self.state,
            token_ids,
            max_new_tokens=self.request.max_total_tokens - self.request.num_prompt_tokens,
        )
        num_kept = check.num_kept
        self.finish_reason, self.stop_reason = check.finish_reason, check.stop_reason
        hide_last = check.finish_reason == "stop" and not self.params.include_stop_str_in_output
        visible = token_ids[: num_kept - 1] if hide_last else token_ids[:num_kept]
        if self._matcher is None:
            self.text += self._detokenizer.push(visible)
        else:
            result = self._matcher.feed([self._detokenizer.push([token_id]) for token_id in visible])
            self.text += result.text
            if result.num_kept is not None:
                num_kept = result.num_kept
                self.finish_reason, self.stop_reason = "stop", result.stop_reason
        if self.finish_reason is not None:
            stop_string = self._release_text()
            if stop_string is not None:
                self.finish_reason, self.stop_reason = "stop", stop_string
        self.state.append(token_ids[:num_kept])
        self.logprobs.extend(self._decoded(raw) for raw in logprobs[:num_kept])
        return num_kept

    def count_prompt_tokens(self, num_computed: int) -> int:
        """Of the ``num_computed`` positions a chunk has just ended, those of the prompt that no earlier chunk computed.

        After a preemption the same positions are computed again, and output with them.
        """
        end = min(self.request.num_computed_tokens, self.request.num_prompt_tokens)
        start = max(self.request.num_computed_tokens - num_computed, self._num_counted_prompt_tokens)
        self._num_counted_prompt_tokens = max(end, self._num_counted_prompt_tokens)
        return max(end - start, 0)

    def end(self, reason: FinishReason, *, error: str | None = None) -> None:
        """End from outside: an abort, or a failure of this request alone."""
        assert self.finish_reason is None, "the sequence has ended"
        self.finish_reason, self.error = reason, error
        if reason == "abort":
            self._release_text()

    def _release_text(self) -> str | None:
        """Text held back for an incomplete character or a possible stop string; the stop string found in it, if any.

        Where a vocabulary spells bytes as tokens, a run of them is text only once it has ended, here perhaps.
        """
        held = self._detokenizer.flush()
        if self._matcher is None:
            self.text += held
        elif not self._matcher.matched:
            result = self._matcher.finish(held)
            self.text += result.text
            return result.stop_reason
        return None

    def _decoded(self, raw: RawLogprobs) -> PositionLogprobs:
        return PositionLogprobs(
            sampled=self._logprob(raw.token_id, raw.logprob, raw.rank),
            top=tuple(self._logprob(entry.token_id, entry.logprob, entry.rank) for entry in raw.top),
        )

    def _logprob(self, token_id: int, logprob: float, rank: int) -> TokenLogprob:
        return TokenLogprob(token_id=token_id, logprob=logprob, rank=rank, decoded=self._tokenizer.id_to_text(token_id))
