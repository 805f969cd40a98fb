"""Snapshots through the wire: what comes out is what went in, and its size is that of what is new."""

from __future__ import annotations

import pickle
import random
from dataclasses import replace

from outrider.engine.deltas import SnapshotDecoder, SnapshotEncoder
from outrider.outputs import CompletionOutput, PositionLogprobs, RequestOutput, SpecCounters, TokenLogprob


def logprob(token_id: int) -> PositionLogprobs:
    entry = TokenLogprob(token_id=token_id, logprob=-1.5, rank=1, decoded=str(token_id))
    return PositionLogprobs(sampled=entry, top=(entry,))


def start(request_id: str, *, n: int, logprobs: bool) -> RequestOutput:
    completions = (
        CompletionOutput(
            index=i, text="", token_ids=(), logprobs=() if logprobs else None, finish_reason=None, stop_reason=None
        )
        for i in range(n)
    )
    return RequestOutput(
        request_id=request_id, prompt="p", prompt_token_ids=(1, 2), outputs=tuple(completions), finished=False
    )


def grown(completion: CompletionOutput, rng: random.Random) -> CompletionOutput:
    if completion.finish_reason is not None or rng.random() < 0.3:
        return completion
    new = tuple(rng.randrange(100) for _ in range(rng.randrange(4)))
    return replace(
        completion,
        text=completion.text + "ab" * rng.randrange(3),
        token_ids=completion.token_ids + new,
        logprobs=None if completion.logprobs is None else completion.logprobs + tuple(map(logprob, new)),
        finish_reason=rng.choice((None, None, None, "length", "stop")),
        stop_reason=rng.choice((None, 7)),
    )


def test_what_goes_in_comes_out() -> None:
    rng = random.Random(0)
    encoder, decoder = SnapshotEncoder(), SnapshotDecoder()
    live: dict[str, RequestOutput] = {}
    for number in range(2000):
        if len(live) < 5:
            request_id = str(number % 7) if str(number % 7) not in live else str(number)  # ids come again
            live[request_id] = start(request_id, n=rng.randrange(1, 4), logprobs=rng.random() < 0.5)
        request_id = rng.choice(list(live))
        now = live[request_id]
        completions = tuple(grown(completion, rng) for completion in now.outputs)
        now = replace(
            now,
            outputs=completions,
            finished=all(completion.finish_reason for completion in completions),
            spec=SpecCounters(rounds=number),
        )
        expected = replace(now, prompt=None, prompt_token_ids=())
        assert decoder.decode(pickle.loads(pickle.dumps(encoder.encode(now)))) == expected
        if now.finished:
            del live[request_id]
        else:
            live[request_id] = now


def test_a_long_answer_costs_no_more_a_step_than_a_short_one() -> None:
    encoder = SnapshotEncoder()
    output = start("a", n=1, logprobs=False)
    sizes = []
    for length in range(1, 2000):
        completion = replace(output.outputs[0], text="x" * length, token_ids=tuple(range(length)))
        sizes.append(len(pickle.dumps(encoder.encode(replace(output, outputs=(completion,))))))
    assert max(sizes) - min(sizes) <= 4, "a larger token id takes bytes more"
