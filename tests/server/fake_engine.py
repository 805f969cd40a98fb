"""A deterministic engine for the HTTP layer: tokens are bytes, and the answer repeats the prompt.

Sequence ``index`` of a request emits the prompt's bytes, over and over, from position ``index`` on; two tokens a
step. ``hold`` keeps every request from going on; ``started``, ``ended`` and ``seen_params`` tell what reached it.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Mapping, Sequence

from outrider.errors import EngineDeadError, InvalidRequestError, QueueFullError
from outrider.outputs import (
    CompletionOutput,
    EngineStats,
    FinishReason,
    PositionLogprobs,
    RequestOutput,
    RequestTiming,
    SpecCounters,
    TokenLogprob,
)
from outrider.sampling_params import SamplingParams

TOKENS_PER_STEP = 2
VOCAB = 256


class ByteTokenizer:
    has_chat_template = True

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        return list(text.encode())

    def apply_chat_template(self, messages: Sequence[Mapping[str, str]], *, add_generation_prompt: bool) -> str:
        if messages[0]["role"] == "assistant":
            raise InvalidRequestError("a conversation must not begin with the assistant", param="messages")
        lines = [f"{message['role']}:{message['content']}\n" for message in messages]
        return "".join(lines) + ("assistant:" if add_generation_prompt else "")


class FakeEngine:
    model_name = "fake/echo"
    vocab_size = VOCAB

    def __init__(self, *, max_model_len: int = 256, queue_limit: int = 64, step_s: float = 0.0) -> None:
        self.max_model_len = max_model_len
        self.tokenizer = ByteTokenizer()
        self.healthy = True
        self.queue_limit = queue_limit
        self.step_s = step_s
        self.hold = False
        self.crash_next = False
        self.fail_requests = False
        self.started: list[str] = []
        self.ended: dict[str, FinishReason] = {}
        self.running: set[str] = set()
        self.seen_params: list[SamplingParams] = []
        self.seen_prompts: list[tuple[str | None, tuple[int, ...]]] = []
        self.prompt_tokens = 0
        self.generated = 0
        self.shut_down = False

    async def generate(
        self, *, prompt: str | None, prompt_token_ids: Sequence[int], params: SamplingParams, request_id: str
    ) -> AsyncGenerator[RequestOutput, None]:
        if len(self.running) >= self.queue_limit:
            raise QueueFullError(f"the queue holds {len(self.running)} requests; at most {self.queue_limit} may wait")
        assert request_id not in self.running
        self.started.append(request_id)
        self.running.add(request_id)
        self.seen_params.append(params)
        self.seen_prompts.append((prompt, tuple(prompt_token_ids)))
        self.prompt_tokens += len(prompt_token_ids)
        reason: FinishReason = "abort"
        start = time.monotonic()
        ttft = 0.0
        try:
            limit = self.max_model_len - len(prompt_token_ids)
            limit = limit if params.max_tokens is None else min(limit, params.max_tokens)
            emitted = 0
            finished = False
            while not finished:
                await self._step(request_id)
                if request_id in self.ended:  # aborted by id, or by shutdown
                    return
                before, emitted = emitted, min(emitted + TOKENS_PER_STEP, limit)
                self.generated += (emitted - before) * params.n
                ttft = ttft or time.monotonic() - start
                outputs = tuple(
                    _completion(prompt_token_ids, params, index=index, emitted=emitted, limit=limit)
                    for index in range(params.n)
                )
                if self.fail_requests:
                    outputs = (_failed(),)
                finished = all(output.finish_reason is not None for output in outputs)
                if finished:
                    reason = outputs[0].finish_reason or "stop"
                yield RequestOutput(
                    request_id=request_id,
                    prompt=prompt,
                    prompt_token_ids=tuple(prompt_token_ids),
                    outputs=outputs,
                    finished=finished,
                    num_cached_tokens=1,
                    timing=RequestTiming(ttft_s=ttft, e2e_s=time.monotonic() - start),
                )
        finally:
            self.running.discard(request_id)
            self.ended.setdefault(request_id, reason)

    async def _step(self, request_id: str) -> None:
        await asyncio.sleep(self.step_s)
        while self.hold and self.healthy and request_id not in self.ended:
            await asyncio.sleep(0.002)
        if self.crash_next:
            self.healthy = False
        if not self.healthy:
            raise EngineDeadError("RuntimeError: secret detail")

    async def abort(self, request_id: str) -> None:
        self.ended[request_id] = "abort"

    async def shutdown(self, drain_s: float) -> None:
        self.shut_down = True
        for request_id in list(self.running):
            await self.abort(request_id)

    def rank_stats(self) -> tuple[EngineStats, ...]:
        return (self.stats(),)

    def stats(self) -> EngineStats:
        reasons = list(self.ended.values())
        return EngineStats(
            num_running=len(self.running),
            num_waiting=0,
            kv_blocks_total=100,
            kv_blocks_free=75,
            prompt_tokens_total=self.prompt_tokens,
            generation_tokens_total=self.generated,
            requests_finished={reason: reasons.count(reason) for reason in ("stop", "length", "abort")},
            preemptions_total=3,
            prefix_cache_queries=40,
            prefix_cache_hits=10,
            spec=SpecCounters(rounds=10, offered=30, accepted=15, emitted=25, per_position=((10, 9), (10, 5), (10, 1))),
            steps_total=12,
            undrafted_tokens_total=6,
            expert_load={"target": (5, 0, 7, 9)},
            expert_parallel_size=2,
        )


def _completion(
    prompt: Sequence[int], params: SamplingParams, *, index: int, emitted: int, limit: int
) -> CompletionOutput:
    """The sequence after ``emitted`` tokens, with vLLM's meaning of stop strings: tokens kept, text cut."""
    ids = [prompt[(index + position) % len(prompt)] for position in range(emitted)]
    reason: FinishReason | None = "length" if emitted >= limit else None
    stop_reason: str | None = None
    for length in range(1, emitted + 1):
        text = bytes(ids[:length]).decode(errors="ignore")
        stopped = next((stop for stop in params.stop if text.endswith(stop)), None)
        if stopped is not None:
            ids, reason, stop_reason = ids[:length], "stop", stopped
            break
    text = bytes(ids).decode(errors="ignore" if reason is None else "replace")
    if stop_reason is not None:
        text = text.removesuffix(stop_reason)
    elif reason is None:
        text = text[: len(text) - max((len(stop) for stop in params.stop), default=0)]
    logprobs = None
    if params.logprobs is not None:
        logprobs = tuple(_position(token_id, params.logprobs) for token_id in ids)
    return CompletionOutput(
        index=index,
        text=text,
        token_ids=tuple(ids),
        logprobs=logprobs,
        finish_reason=reason,
        stop_reason=stop_reason,
    )


def _position(token_id: int, num_top: int) -> PositionLogprobs:
    """The sampled token second in rank; the others are its neighbours. One cannot occur."""
    top = tuple(
        TokenLogprob(
            token_id=(token_id + 1 - rank) % VOCAB,
            logprob=-0.5 * (rank + 1) if rank < 3 else float("-inf"),
            rank=rank + 1,
            decoded=_decoded((token_id + 1 - rank) % VOCAB),
        )
        for rank in range(num_top)
    )
    return PositionLogprobs(
        sampled=TokenLogprob(token_id=token_id, logprob=-1.0, rank=2, decoded=_decoded(token_id)), top=top
    )


def _decoded(token_id: int) -> str:
    return bytes([token_id]).decode(errors="replace")


def _failed() -> CompletionOutput:
    return CompletionOutput(
        index=0, text="", token_ids=(), logprobs=None, finish_reason="error", stop_reason=None, error="bad luck"
    )
