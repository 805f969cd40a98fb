"""One run of a workload through the Python API: the step loop with a clock.

A closed loop keeps at most ``max_concurrency`` requests in flight and sends the next when one ends; times count from
there. With ``arrivals_s`` a request is due at its own moment and times count from that moment, whether or not the
engine was busy with a step or full.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence

from outrider.bench.served import Run, Served
from outrider.bench.workload import BenchRequest
from outrider.engine.engine import Engine
from outrider.errors import OutriderError
from outrider.spec_decode.counters import merge_counters


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
