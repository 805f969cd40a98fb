"""Latency of one stream: every prompt runs through every contender back to back, repetition after repetition."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

from outrider.bench.comparison import Comparison, compare, rotated
from outrider.bench.contenders import Contenders
from outrider.bench.run import run_requests
from outrider.bench.served import Run
from outrider.bench.workload import BenchRequest
from outrider.config import ProposerName
from outrider.engine.engine import Engine

_WARM_UP_TOKENS = 16


def measure_latency(
    contenders: Contenders,
    requests: Sequence[BenchRequest],
    *,
    repeat: int,
    on_served: Callable[[], object] = lambda: None,
) -> Comparison:
    """``on_served`` is called once a request, contender and repetition."""
    room = contenders.num_kv_tokens(requests, max_concurrency=1)
    cores = {name: contenders.build(name, num_kv_tokens=room) for name in contenders.names}
    for core in cores.values():
        warm_up(core, requests[:1])
    runs: dict[ProposerName, list[Run]] = {name: [] for name in cores}
    for repetition in range(repeat):
        parts: dict[ProposerName, list[Run]] = {name: [] for name in cores}
        for index, request in enumerate(requests):
            for name in rotated(contenders.names, repetition + index):
                parts[name].append(run_requests(cores[name], [request], max_concurrency=1, on_served=on_served))
        for name in cores:
            runs[name].append(Run.joined(parts[name]))
    return compare(runs, check_output=all(request.params.is_greedy for request in requests))


def warm_up(core: Engine, requests: Sequence[BenchRequest]) -> None:
    """A few tokens of each request, together: first calls cost more than later ones."""
    short = [
        dataclasses.replace(request, params=dataclasses.replace(request.params, max_tokens=_WARM_UP_TOKENS))
        for request in requests
    ]
    run_requests(core, short, max_concurrency=len(short))
