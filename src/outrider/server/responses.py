"""OpenAI's response objects, as plain dicts. What has a delta and what has a whole text differ in few keys."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from outrider.outputs import CompletionOutput, PositionLogprobs, RequestOutput, TokenLogprob

Json = dict[str, object]

# JSON has no infinity; OpenAI's value for a token that cannot occur.
_LOWEST_LOGPROB = -9999.0
_REPLACEMENT = "\ufffd"


@dataclass(frozen=True, slots=True, kw_only=True)
class Header:
    """What every object of one answer repeats."""

    id: str
    created: int
    model: str

    def wrap(self, object_name: str, choices: list[Json]) -> Json:
        return {
            "id": self.id,
            "object": object_name,
            "created": self.created,
            "model": self.model,
            "choices": choices,
        }


def usage(outputs: Sequence[RequestOutput]) -> Json:
    """A prompt counts once however many sequences continue it; ``completion_tokens`` counts emitted token ids."""
    prompt_tokens = sum(len(output.prompt_token_ids) for output in outputs)
    completion_tokens = sum(len(completion.token_ids) for output in outputs for completion in output.outputs)
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
        "prompt_tokens_details": {"cached_tokens": sum(output.num_cached_tokens for output in outputs)},
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class Delta:
    """What one sequence has gained since it was last looked at."""

    text: str
    logprobs: tuple[PositionLogprobs, ...] | None  # None: not asked for
    text_offset: int  # where the text of the first of ``logprobs`` begins
    finish_reason: str | None
    stop_reason: int | str | None


class DeltaTracker:
    """Turns one sequence's cumulative snapshots into deltas that add up to the last snapshot."""

    def __init__(self) -> None:
        self._num_chars = 0
        self._num_logprobs = 0
        self._text_offset = 0
        self._finished = False

    def advance(self, completion: CompletionOutput) -> Delta | None:
        """None: nothing to tell. A character whose bytes are incomplete, and a possible stop string, come later."""
        if self._finished:
            return None
        text = completion.text[self._num_chars :]
        logprobs = None if completion.logprobs is None else completion.logprobs[self._num_logprobs :]
        self._finished = completion.finish_reason is not None
        if not (text or logprobs or self._finished):
            return None
        delta = Delta(
            text=text,
            logprobs=logprobs,
            text_offset=self._text_offset,
            finish_reason=completion.finish_reason,
            stop_reason=completion.stop_reason,
        )
        self._num_chars = len(completion.text)
        for entry in logprobs or ():
            self._num_logprobs += 1
            self._text_offset += len(entry.sampled.decoded)
        return delta


def completion_choice(*, index: int, delta: Delta) -> Json:
    return {
        "index": index,
        "text": delta.text,
        "logprobs": None
        if delta.logprobs is None
        else completion_logprobs(delta.logprobs, text_offset=delta.text_offset),
        "finish_reason": delta.finish_reason,
        "stop_reason": delta.stop_reason,
    }


def chat_choice(*, index: int, delta: Delta) -> Json:
    return {
        "index": index,
        "message": {"role": "assistant", "content": delta.text, "refusal": None},
        **_chat_tail(delta),
    }


def chat_chunk_choice(*, index: int, delta: Delta) -> Json:
    return {"index": index, "delta": {"content": delta.text} if delta.text else {}, **_chat_tail(delta)}


def chat_role_choice(*, index: int) -> Json:
    """The first chunk of each sequence."""
    return {"index": index, "delta": {"role": "assistant", "content": ""}, "logprobs": None, "finish_reason": None}


def _chat_tail(delta: Delta) -> Json:
    return {
        "logprobs": None if delta.logprobs is None else chat_logprobs(delta.logprobs),
        "finish_reason": delta.finish_reason,
        "stop_reason": delta.stop_reason,
    }


def chat_logprobs(positions: Sequence[PositionLogprobs]) -> Json:
    content = []
    for position in positions:
        top: list[Json] = [_chat_token(token) for token in position.top]
        content.append({**_chat_token(position.sampled), "top_logprobs": top})
    return {"content": content, "refusal": None}


def _chat_token(token: TokenLogprob) -> Json:
    # A part of a character reads as U+FFFD, whose bytes would not be the token's.
    token_bytes = None if _REPLACEMENT in token.decoded else list(token.decoded.encode())
    return {"token": token.decoded, "logprob": _finite(token.logprob), "bytes": token_bytes}


def completion_logprobs(positions: Sequence[PositionLogprobs], *, text_offset: int) -> Json:
    """The older form: parallel lists. The sampled token is always among ``top_logprobs``."""
    tokens: list[str] = []
    token_logprobs: list[float] = []
    top_logprobs: list[dict[str, float]] = []
    offsets: list[int] = []
    for position in positions:
        offsets.append(text_offset)
        text_offset += len(position.sampled.decoded)
        tokens.append(position.sampled.decoded)
        token_logprobs.append(_finite(position.sampled.logprob))
        top = {token.decoded: _finite(token.logprob) for token in position.top}
        top[position.sampled.decoded] = _finite(position.sampled.logprob)  # wins where two ids read alike
        top_logprobs.append(top)
    return {
        "tokens": tokens,
        "token_logprobs": token_logprobs,
        "top_logprobs": top_logprobs,
        "text_offset": offsets,
    }


def _finite(logprob: float) -> float:
    return max(logprob, _LOWEST_LOGPROB)
