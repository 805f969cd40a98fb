"""What the ranks of an engine say to each other in a step: how many collectives, how many bytes, and what they cost.

    python -m benchmarks.collectives [--requests 4] [--steps 30] [--no-time]

Small random models (the tests' own: hidden size 64, 4 layers, 8 experts of which 2 a token; 7 drafts) on data-parallel
sizes 2 and 4, and 2 x tensor-parallel 2. Every data-parallel rank but the last decodes ``--requests`` requests; the
last one has as many ("busy") or none ("idle").

Counts are exact: engines on simulated ranks, whose communicators note every call; bytes are what leaves a rank. Rows of
experts are what grows with the model: their bytes are proportional to rows, hidden size and expert layers. Times are of
real processes over gloo: the median time of a step, by the clock, and the processor time of busy and idle ranks. On a
machine with fewer cores than ranks the ranks take turns, so that the clock says little and processor time is to be
compared. Tables, then one JSON line.
"""

from __future__ import annotations

import argparse
import logging
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

from rich.console import Console
from rich.table import Table
from tests import fixtures
from tests.engine.zoo import greedy, random_prompt
from tests.parallel.ranks import run_ranks

from outrider.cli.json_output import print_json_line
from outrider.config import EngineArgs
from outrider.engine.engine_core import EngineCore
from outrider.engine.setup import build_engine, topology_of
from outrider.parallel.recording import CollectiveCall
from outrider.parallel.simulated import Simulation
from outrider.parallel.state import ParallelState

SHAPES = ((2, 1), (4, 1), (2, 2))  # data-parallel, tensor-parallel
WARM_STEPS = 3  # prompts are computed in the first
MAX_TOKENS = 400
MAX_REQUESTS = 16

Kind = Literal["agreement", "experts", "tensor parallel"]
KINDS: tuple[Kind, ...] = ("agreement", "experts", "tensor parallel")
StepKind = Literal["prefill", "decode", "all idle"]
Rank = Literal["busy", "idle"]  # rank 0, and the last one


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    models: Literal["moe", "dense"]  # target and drafter
    transport: Literal["allgather_reducescatter", "alltoall"]
    tiers: bool
    dp: int
    tp: int

    @property
    def name(self) -> str:
        experts = f"{self.models}, {self.transport}" if self.models == "moe" else "dense"
        return f"dp {self.dp} tp {self.tp}, {experts}, {'tiers' if self.tiers else 'eager'}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Volume:
    calls: int
    bytes_sent: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Traffic:
    """Of one rank in one step."""

    setup: Setup
    step: StepKind
    rank: Rank
    volumes: dict[Kind, Volume]


@dataclass(frozen=True, slots=True, kw_only=True)
class Times:
    """Milliseconds a step: medians by the clock, means of processor time (rank 0, and the last rank)."""

    setup: Setup
    all_busy_ms: float
    all_busy_cpu_ms: float
    one_idle_ms: float
    one_idle_busy_cpu_ms: float
    one_idle_idle_cpu_ms: float
    nobody_busy_ms: float
    gather_ms: float  # the agreement's all-gather alone


@dataclass(frozen=True, slots=True)
class RankTimes:
    all_busy: tuple[float, float]  # seconds a step: clock, processor
    one_idle: tuple[float, float]
    nobody_busy: tuple[float, float]
    gather: float


def setups(shapes: Sequence[tuple[int, int]]) -> list[Setup]:
    made = []
    for dp, tp in shapes:
        made += [
            Setup(models="moe", transport="allgather_reducescatter", tiers=tiers, dp=dp, tp=tp)
            for tiers in (False, True)
        ]
        made.append(Setup(models="moe", transport="alltoall", tiers=False, dp=dp, tp=tp))
        made.append(Setup(models="dense", transport="allgather_reducescatter", tiers=False, dp=dp, tp=tp))
    return made


def engine_args(setup: Setup, root: Path) -> EngineArgs:
    return EngineArgs(
        model=str(root / f"{setup.models}-target"),
        draft=str(root / f"{setup.models}-drafter"),
        max_model_len=512,
        max_num_seqs=MAX_REQUESTS,
        max_num_batched_tokens=1024,
        kv_cache_memory_bytes=1 << 24,
        quantization="none",
        enforce_eager=not setup.tiers,
        data_parallel_size=setup.dp,
        tensor_parallel_size=setup.tp,
        enable_expert_parallel=setup.models == "moe",
        all2all_backend=setup.transport if setup.models == "moe" else "allgather_reducescatter",
    )


def add_requests(core: EngineCore, count: int) -> None:
    for i in range(count):
        params = greedy(MAX_TOKENS, ignore_eos=True)
        core.add_request(request_id=f"{i}", prompt=None, prompt_token_ids=random_prompt(16, seed=i), params=params)


def abort_all(core: EngineCore, count: int) -> None:
    for i in range(count):
        core.abort(f"{i}")


# ---------------------------------------------------------------------------------------------------- counts


def count_traffic(setup: Setup, root: Path, requests: int) -> list[Traffic]:
    """Of a prefill step and a decode step in which the last data-parallel rank is idle, and of one without any work."""
    args = engine_args(setup, root)
    simulation = Simulation(topology_of(args))

    def on_rank(parallel: ParallelState) -> dict[StepKind, list[CollectiveCall]]:
        core = build_engine(args, parallel=parallel)
        record = simulation.calls[parallel.rank]

        def step() -> list[CollectiveCall]:
            start = len(record)
            core.step()
            return record[start:]

        own = requests if parallel.attn_dp.rank < setup.dp - 1 else 0
        add_requests(core, own)
        steps: dict[StepKind, list[CollectiveCall]] = {"prefill": step()}
        for _ in range(WARM_STEPS):
            steps["decode"] = step()
        abort_all(core, own)
        steps["all idle"] = step()
        return steps

    of_rank = simulation.run(on_rank)
    ranks: tuple[tuple[Rank, dict[StepKind, list[CollectiveCall]]], ...] = (("busy", of_rank[0]), ("idle", of_rank[-1]))
    return [
        Traffic(setup=setup, step=step, rank=rank, volumes={kind: _volume(calls[step], kind) for kind in KINDS})
        for step in of_rank[0]
        for rank, calls in ranks
        if (step, rank) != ("all idle", "busy")
    ]


def _volume(calls: Sequence[CollectiveCall], kind: Kind) -> Volume:
    own = [call for call in calls if _kind(call) == kind]
    return Volume(calls=len(own), bytes_sent=sum(call.bytes_sent for call in own))


def _kind(call: CollectiveCall) -> Kind:
    """Within an attention-TP group, sums of attention, MLPs and experts count alike."""
    if call.name == "all_gather_row":
        return "agreement"
    return "tensor parallel" if call.group == "attn_tp" else "experts"


# ---------------------------------------------------------------------------------------------------- times


def time_steps(setup: Setup, root: Path, *, requests: int, steps: int) -> Times:
    args = engine_args(setup, root)
    first, *_, last = run_ranks(topology_of(args), time_rank, args, requests, steps, timeout=900.0)
    return Times(
        setup=setup,
        all_busy_ms=1e3 * first.all_busy[0],
        all_busy_cpu_ms=1e3 * first.all_busy[1],
        one_idle_ms=1e3 * first.one_idle[0],
        one_idle_busy_cpu_ms=1e3 * first.one_idle[1],
        one_idle_idle_cpu_ms=1e3 * last.one_idle[1],
        nobody_busy_ms=1e3 * first.nobody_busy[0],
        gather_ms=1e3 * first.gather,
    )


def time_rank(parallel: ParallelState, args: EngineArgs, requests: int, steps: int) -> RankTimes:
    logging.getLogger("outrider").setLevel(logging.WARNING)
    core = build_engine(args, parallel=parallel)
    is_last = parallel.attn_dp.rank == args.data_parallel_size - 1
    found: list[tuple[float, float]] = []
    for own in (requests, 0 if is_last else requests, 0):
        add_requests(core, own)
        for _ in range(1 + WARM_STEPS):
            core.step()
        found.append(_time(core.step, steps))
        abort_all(core, own)
    row = [0] * 10
    gather, _ = _time(lambda: parallel.attn_dp.all_gather_row(row), 10 * steps)
    all_busy, one_idle, nobody_busy = found
    return RankTimes(all_busy, one_idle, nobody_busy, gather)


def _time(call: Callable[[], object], times: int) -> tuple[float, float]:
    """Seconds: median by the clock, mean of this process's processor time."""
    clock = []
    cpu = time.process_time()
    for _ in range(times):
        start = time.perf_counter()
        call()
        clock.append(time.perf_counter() - start)
    return statistics.median(clock), (time.process_time() - cpu) / times


# ---------------------------------------------------------------------------------------------------- output


def print_traffic(console: Console, traffic: Sequence[Traffic], requests: int) -> None:
    table = Table(title=f"collectives a step: calls / bytes sent; {requests} requests on every busy rank")
    for column in ("set-up", "step", "rank", *KINDS):
        table.add_column(column, justify="left" if column in ("set-up", "step", "rank") else "right")
    for row in traffic:
        volumes = [f"{v.calls} / {v.bytes_sent:,}" if v.calls else "-" for v in row.volumes.values()]
        table.add_row(
            row.setup.name if (row.step, row.rank) == ("prefill", "busy") else "", row.step, row.rank, *volumes
        )
    console.print(table)


def print_times(console: Console, times: Sequence[Times]) -> None:
    table = Table(title="milliseconds a step; CPU: processor time of one rank")
    table.add_column("set-up")
    for column in ("all busy", "CPU", "last idle", "CPU busy", "CPU idle", "nobody busy", "gather alone"):
        table.add_column(column, justify="right")
    for row in times:
        values = [value for name, value in asdict(row).items() if name != "setup"]
        table.add_row(row.setup.name, *(f"{value:.2f}" for value in values))
    console.print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description="Collectives of an engine's step: counts, bytes and times.")
    parser.add_argument("--requests", type=int, default=4, help=f"on every busy rank, up to {MAX_REQUESTS}")
    parser.add_argument("--steps", type=int, default=30, help="decode steps that are timed")
    parser.add_argument("--time", action=argparse.BooleanOptionalAction, default=True, help="time real processes too")
    options = parser.parse_args()
    if not 1 <= options.requests <= MAX_REQUESTS:
        parser.error(f"--requests {options.requests} must lie in 1..{MAX_REQUESTS}")
    if not 1 <= options.steps <= MAX_TOKENS // 8 - WARM_STEPS - 2:  # every draft may be accepted
        parser.error(f"--steps {options.steps} must lie in 1..{MAX_TOKENS // 8 - WARM_STEPS - 2}")
    logging.getLogger("outrider").setLevel(logging.WARNING)
    console = Console(width=150)
    with tempfile.TemporaryDirectory(prefix="outrider-collectives-") as folder:
        root = Path(folder)
        fixtures.make_moe_target(root / "moe-target")
        fixtures.make_moe_drafter(root / "moe-drafter")
        fixtures.make_rand_target(root / "dense-target")
        fixtures.make_random_drafter(root / "dense-drafter")
        traffic = [row for setup in setups(SHAPES) for row in count_traffic(setup, root, options.requests)]
        print_traffic(console, traffic, options.requests)
        times = []
        if options.time:
            times = [
                time_steps(setup, root, requests=options.requests, steps=options.steps) for setup in setups(SHAPES)
            ]
            print_times(console, times)
    print_json_line(
        {
            "requests": options.requests,
            "traffic": [asdict(row) for row in traffic],
            "times": [asdict(row) for row in times],
        }
    )


if __name__ == "__main__":
    main()
