"""Throughput of many requests: each contender serves the whole workload, repetition after repetition.

Over the Python API; or over HTTP, through a server on a thread of this process, so that client and server share its
cores; or through a server that runs elsewhere, which then is the only contender.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial

from outrider.bench.comparison import Comparison, ContenderFigures, compare, rotated
from outrider.bench.contenders import Contenders
from outrider.bench.http_load import HttpTarget, run_over_http
from outrider.bench.http_server import serving
from outrider.bench.latency import warm_up
from outrider.bench.run import run_requests
from outrider.bench.served import Run
from outrider.bench.workload import BenchRequest
from outrider.config import ProposerName


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """The workload and how it arrives; ``arrivals_s`` None: a closed loop of ``max_concurrency`` clients."""

    requests: Sequence[BenchRequest]
    max_concurrency: int
    arrivals_s: Sequence[float] | None
    repeat: int
    on_served: Callable[[], object] = lambda: None  # once a request, contender and repetition


def measure_throughput(contenders: Contenders, load: Load, *, http: bool) -> Comparison:
    room = contenders.num_kv_tokens(load.requests, max_concurrency=load.max_concurrency)
    cores = {name: contenders.build(name, num_kv_tokens=room) for name in contenders.names}
    runs: dict[ProposerName, list[Run]] = {name: [] for name in cores}
    with ExitStack() as stack:
        serve: dict[ProposerName, Callable[[], Run]] = {}
        for name, core in cores.items():
            warm_up(core, load.requests[: contenders.args.max_num_seqs])
            if http:
                serve[name] = partial(_over_http, stack.enter_context(serving(core, contenders.config.model)), load)
            else:
                serve[name] = partial(
                    run_requests,
                    core,
                    load.requests,
                    max_concurrency=load.max_concurrency,
                    arrivals_s=load.arrivals_s,
                    on_served=load.on_served,
                )
        for repetition in range(load.repeat):
            for name in rotated(contenders.names, repetition):
                runs[name].append(serve[name]())
    greedy = all(request.params.is_greedy for request in load.requests)
    return compare(runs, check_output=greedy and not http)


def measure_server(target: HttpTarget, load: Load) -> ContenderFigures:
    """A server that runs elsewhere. Its drafting counters include what other clients did meanwhile."""
    return ContenderFigures.of([_over_http(target, load) for _ in range(load.repeat)])


def _over_http(target: HttpTarget, load: Load) -> Run:
    return run_over_http(
        target,
        load.requests,
        max_concurrency=load.max_concurrency,
        arrivals_s=load.arrivals_s,
        on_served=load.on_served,
    )
