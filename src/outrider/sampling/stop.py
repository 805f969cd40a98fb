"""When a sequence ends: by token, by length, by text. The first event in token order wins.

A round emits a run of tokens; whatever lies behind the first stop event in it must not be seen by anyone, so both
checks name the token at which the sequence ends.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from outrider.outputs import FinishReason
from outrider.sampling.state import SequenceState


class StopCheck(NamedTuple):
    num_kept: int  # of the new tokens; the stop token is among them
    finish_reason: FinishReason | None  # None: goes on
    stop_reason: int | None  # the stop token id, where ``stop_token_ids`` ended it


def check_stop(state: SequenceState, new_token_ids: Sequence[int], *, max_new_tokens: int) -> StopCheck:
    """Check tokens not yet appended to ``state``.

    ``max_new_tokens`` counts all of the sequence's output tokens: max_tokens, or fewer where the context ends first.
    Before min_tokens only the length ends a sequence. At one token, end-of-sequence precedes ``stop_token_ids``
    and both precede the length.
    """
    params = state.params
    num_output = len(state.output_token_ids)
    assert num_output < max_new_tokens, f"{num_output} tokens emitted of at most {max_new_tokens}"
    for kept, token_id in enumerate(new_token_ids, start=1):
        if num_output + kept > params.min_tokens:
            if token_id in state.eos_token_ids and not params.ignore_eos:
                return StopCheck(kept, "stop", None)
            if token_id in params.stop_token_ids:
                return StopCheck(kept, "stop", token_id)
        if num_output + kept >= max_new_tokens:
            return StopCheck(kept, "length", None)
    return StopCheck(len(new_token_ids), None, None)


@dataclass(frozen=True, slots=True)
class StopStringResult:
    """What feeding some tokens' text gave."""

    text: str  # newly final text: may be shown, will not be taken back
    num_kept: int | None  # tokens fed up to and with the one that completed a stop string; None: no match
    stop_reason: str | None  # the stop string


class StopStringMatcher:
    """Finds stop strings in text that arrives token by token, also across tokens.

    The match is the one that completes first, character by character; of several that complete at one character,
    the longest. Invariant: ``_tail`` is the longest end of the text that begins a stop string, so that a match must
    start within it or behind it, and nothing ahead of it can become part of one.
    """

    __slots__ = ("_include", "_min_tokens", "_num_tokens", "_stop", "_tail", "matched")

    def __init__(self, stop: Sequence[str], *, include_stop_str: bool, min_tokens: int = 0) -> None:
        self._stop = tuple(stop)
        self._include = include_stop_str
        self._min_tokens = min_tokens  # a match completed by one of the first min_tokens tokens is plain text
        self._num_tokens = 0
        self._tail = ""
        self.matched = False

    def feed(self, deltas: Sequence[str]) -> StopStringResult:
        """Take in one text delta per token, in order; a delta may be empty."""
        assert not self.matched, "the text has ended"
        released: list[str] = []
        for index, delta in enumerate(deltas, start=1):
            self._num_tokens += 1
            window, num_old = self._tail + delta, len(self._tail)
            match = self._first_match(window, num_old) if self._num_tokens > self._min_tokens else None
            if match is not None:
                start, stop_string = match
                self.matched, self._tail = True, ""
                end = start + len(stop_string)
                # With include the tail was released already: it is output whether or not a match follows.
                released.append(window[num_old:end] if self._include else window[:start])
                return StopStringResult("".join(released), index, stop_string)
            self._tail = self._possible_start(window)
            released.append(delta if self._include else window[: len(window) - len(self._tail)])
        return StopStringResult("".join(released), None, None)

    def finish(self, delta: str) -> StopStringResult:
        """Take in the text that tokens fed before still owed, then all that is held back: the sequence has ended."""
        self._num_tokens -= 1  # it belongs to the last of them
        result = self.feed([delta])
        return StopStringResult(result.text + self.flush(), result.num_kept, result.stop_reason)

    def flush(self) -> str:
        """The text still held back, to be shown when the sequence ends otherwise."""
        held, self._tail = "" if self._include else self._tail, ""
        return held

    def _first_match(self, window: str, num_old: int) -> tuple[int, str] | None:
        """Start and string of the match that ends first behind the ``num_old`` characters seen before."""
        best: tuple[int, int, str] | None = None  # end, start, string
        for stop_string in self._stop:
            start = window.find(stop_string, max(0, num_old - len(stop_string) + 1))
            if start >= 0:
                candidate = (start + len(stop_string), start, stop_string)
                best = candidate if best is None else min(best, candidate)
        return None if best is None else (best[1], best[2])

    def _possible_start(self, window: str) -> str:
        """The longest end of ``window`` that is a proper beginning of a stop string."""
        longest = min(len(window), max((len(s) for s in self._stop), default=1) - 1)
        for size in range(longest, 0, -1):
            end = window[-size:]
            if any(len(s) > size and s.startswith(end) for s in self._stop):
                return end
        return ""
