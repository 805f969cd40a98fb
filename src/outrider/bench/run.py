"""One run of a workload through the Python API: the step loop with a clock.

A closed loop keeps at most ``max_concurrency`` requests in flight and sends the next when one ends; times count from
there. With ``arrivals_s`` a request is due at its own moment and times count from that moment, whether or not the
engine was busy with a step or full.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from outrider.bench.workload import BenchRequest
from outrider.engine.engine import Engine
from outrider.errors import OutriderError
from outrider.outputs import SpecCounters
from outrider.spec_decode.counters import merge_counters


@dataclass(frozen=True, slots=True, kw_only=True)
class Served:
    """What one request got."""

    num_tokens: int
    ttft_s: float
    e2e_s: float
    token_ids: tuple[int, ...] = ()  # empty over HTTP, where text comes back
    spec: SpecCounters = field(default_factory=SpecCounters)  # empty over HTTP, where only the sum is known

    @property
    def decode_s(self) -> float:
        """From the first token to the last."""
        return self.e2e_s - self.ttft_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """A workload from its first request to its last token."""

    served: tuple[Served, ...]  # in the order of the requests
    elapsed_s: float
    spec: SpecCounters

    @property
    def num_tokens(self) -> int:
        return sum(served.num_tokens for served in self.served)

    @property
    def requests_per_s(self) -> float:
        return len(self.served) / self.elapsed_s

    @property
    def output_tokens_per_s(self) -> float:
        return self.num_tokens / self.elapsed_s

    @property
    def decode_tokens_per_s(self) -> float:
        """Of one stream after its first token, all streams weighed by their time; 0.0 without second tokens."""
        seconds = sum(served.decode_s for served in self.served)
        return sum(max(served.num_tokens - 1, 0) for served in self.served) / seconds if seconds > 0 else 0.0

    @classmethod
    def joined(cls, parts: Sequence[Run]) -> Run:
        """Runs that came one after another, without what lay between them."""
        return cls(
            served=tuple(served for part in parts for served in part.served),
            elapsed_s=sum(part.elapsed_s for part in parts),
            spec=merge_counters(part.spec for part in parts),
        )


def run_requests(
    core: Engine,
    requests: Sequence[BenchRequest],
    *,
    max_concurrency: int,
    arrivals_s: Sequence[float] | None = None,
    on_served: Callable[[], object] = lambda: None,
) -> Run:
    """Serve ``requests`` on an idle engine. Raises OutriderError if one of them fails."""
    assert not core.has_unfinished
    waiting = deque(range(len(requests)))
    started: dict[int, float] = {}  # requests in flight, by index: when their time began
    first_token: dict[int, float] = {}
    served: dict[int, Served] = {}
    began = time.perf_counter()
    while len(served) < len(requests):
        now = time.perf_counter() - began
        while waiting and len(started) < max_concurrency and (arrivals_s is None or arrivals_s[waiting[0]] <= now):
            index = waiting.popleft()
            request = requests[index]
            core.add_request(
                request_id=str(index), prompt=request.text, prompt_token_ids=request.token_ids, params=request.params
            )
            started[index] = now if arrivals_s is None else arrivals_s[index]
        if not started:
            assert arrivals_s is not None
            time.sleep(arrivals_s[waiting[0]] - now)
            continue
        outputs = core.step()
        now = time.perf_counter() - began
        for output in outputs:
            index, completion = int(output.request_id), output.outputs[0]
            first_token.setdefault(index, now)
            if not output.finished:
                continue
            if completion.finish_reason == "error":
                raise OutriderError(f"request {index} failed: {completion.error}")
            start = started.pop(index)
            served[index] = Served(
                num_tokens=len(completion.token_ids),
                ttft_s=first_token[index] - start,
                e2e_s=now - start,
                token_ids=completion.token_ids,
                spec=output.spec,
            )
            on_served()
    elapsed_s = time.perf_counter() - began
    in_order = tuple(served[index] for index in range(len(requests)))
    return Run(served=in_order, elapsed_s=elapsed_s, spec=merge_counters(each.spec for each in in_order))
