"""Snapshots on their way from a rank to the front: only what is new since the last one of the same request.

Contract: for snapshots of one engine in their order, ``SnapshotDecoder`` gives back what ``SnapshotEncoder`` was given,
but for the prompt, which the front has. Text, tokens and logprobs of a completion only ever grow at their end; so a
request costs what it emits, and not the square of it. Both forget a request with its last snapshot.
"""

from __future__ import annotations

from dataclasses import replace

from outrider.outputs import CompletionOutput, RequestOutput


class SnapshotEncoder:
    def __init__(self) -> None:
        self._sent: dict[str, tuple[CompletionOutput, ...]] = {}

    def encode(self, output: RequestOutput) -> RequestOutput:
        """``output`` with only the new part of each completion, and without the prompt."""
        sent = self._sent.get(output.request_id)
        if output.finished:
            self._sent.pop(output.request_id, None)
        else:
            self._sent[output.request_id] = output.outputs
        new = output.outputs if sent is None else tuple(map(_behind, sent, output.outputs))
        return replace(output, prompt=None, prompt_token_ids=(), outputs=new)


class SnapshotDecoder:
    def __init__(self) -> None:
        self._received: dict[str, tuple[CompletionOutput, ...]] = {}

    def decode(self, delta: RequestOutput) -> RequestOutput:
        """The whole snapshot, without the prompt."""
        received = self._received.get(delta.request_id)
        whole = delta.outputs if received is None else tuple(map(_joined, received, delta.outputs))
        if delta.finished:
            self._received.pop(delta.request_id, None)
        else:
            self._received[delta.request_id] = whole
        return replace(delta, outputs=whole)


def _behind(sent: CompletionOutput, now: CompletionOutput) -> CompletionOutput:
    """What ``now`` has beyond ``sent``."""
    assert now.text.startswith(sent.text), "text that was handed out has changed"
    logprobs = now.logprobs if now.logprobs is None else now.logprobs[len(sent.logprobs or ()) :]
    return replace(
        now, text=now.text[len(sent.text) :], token_ids=now.token_ids[len(sent.token_ids) :], logprobs=logprobs
    )


def _joined(before: CompletionOutput, delta: CompletionOutput) -> CompletionOutput:
    logprobs = delta.logprobs if delta.logprobs is None else (before.logprobs or ()) + delta.logprobs
    return replace(
        delta, text=before.text + delta.text, token_ids=before.token_ids + delta.token_ids, logprobs=logprobs
    )
