"""Simulated ranks end: a program that real ranks would hang in raises on every rank, and says which rank did what."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from datetime import timedelta

import pytest
import torch

from outrider.errors import CollectiveError
from outrider.parallel.simulated import Simulation, run_simulated
from outrider.parallel.state import ParallelState
from outrider.parallel.topology import Topology


def topology(dp: int, tp: int) -> Topology:
    return Topology(data_parallel_size=dp, tensor_parallel_size=tp, enable_expert_parallel=False)


def errors_of(shape: Topology, fn: Callable[[ParallelState], object]) -> list[str]:
    """The error of every rank that raised a CollectiveError."""

    def guarded(parallel: ParallelState) -> str:
        try:
            fn(parallel)
        except CollectiveError as error:
            return str(error)
        return ""

    start = time.monotonic()
    errors = run_simulated(shape, guarded)
    assert time.monotonic() - start < 5, "found by its timeout, not by what it is"
    return errors


@pytest.mark.parametrize(
    ("fn", "pattern"),
    [
        pytest.param(
            lambda p: p.world.all_reduce(torch.zeros(2)) if p.rank else p.world.all_gather(torch.zeros(2)),
            ("rank 0 world.all_gather float32[2]", "rank 1 world.all_reduce float32[2]"),
            id="other collective",
        ),
        pytest.param(
            lambda p: p.world.all_reduce(torch.zeros(2 + p.rank)),
            ("rank 0 world.all_reduce float32[2]", "rank 1 world.all_reduce float32[3]"),
            id="other shape",
        ),
        pytest.param(
            lambda p: p.world.all_reduce(torch.zeros(2, dtype=torch.bfloat16 if p.rank else torch.float32)),
            ("float32[2]", "bfloat16[2]"),
            id="other dtype",
        ),
        pytest.param(
            lambda p: (p.world if p.rank else p.attn_dp).all_reduce(torch.zeros(2)),
            ("rank 0 attn_dp.all_reduce", "rank 1 world.all_reduce"),
            id="other group of the same ranks",
        ),
        pytest.param(
            lambda p: p.world.all_gather_row([1] * (1 + p.rank)),
            ("int64[1]", "int64[2]"),
            id="other length of row",
        ),
        pytest.param(
            lambda p: p.world.all_to_all(torch.zeros(3, 2), [1, 2], [1, 1]),
            ("rank 0 world.all_to_all float32['rows', 2] counts ((1, 2), (1, 1))",),
            id="counts that do not fit",
        ),
    ],
)
def test_a_mismatch_raises_on_all_ranks(fn: Callable[[ParallelState], object], pattern: tuple[str, ...]) -> None:
    for error in errors_of(topology(2, 1), fn):
        assert "do not agree" in error
        for text in pattern:
            assert text in error, error


def test_waiting_in_a_circle_raises_on_all_ranks() -> None:
    def fn(parallel: ParallelState) -> None:
        first, second = (parallel.attn_tp, parallel.attn_dp) if parallel.rank in (0, 3) else (
            parallel.attn_dp, parallel.attn_tp
        )  # fmt: skip
        first.all_reduce(torch.zeros(1))
        second.all_reduce(torch.zeros(1))

    errors = errors_of(topology(2, 2), fn)
    assert len(set(errors)) == 1
    assert errors[0].startswith("no rank can go on: rank 0 waits in attn_tp.all_reduce float32[1]; rank 1 waits in")


def test_a_rank_that_returns_early_is_named() -> None:
    def fn(parallel: ParallelState) -> None:
        if parallel.rank != 2:
            parallel.world.all_reduce(torch.zeros(1))

    errors = errors_of(topology(4, 1), fn)
    assert errors[2] == ""
    assert all("rank 2 has returned" in errors[rank] for rank in (0, 1, 3))


def test_an_error_of_a_ranks_own_is_what_the_caller_sees() -> None:
    def fn(parallel: ParallelState) -> None:
        if parallel.rank == 1:
            raise KeyError("own")
        parallel.world.all_reduce(torch.zeros(1))

    with pytest.raises(KeyError, match="own") as caught:
        run_simulated(topology(3, 1), fn)
    assert caught.value.__notes__ == ["on simulated rank 1"]


def test_a_busy_rank_is_given_up_after_the_timeout() -> None:
    release = threading.Event()

    def fn(parallel: ParallelState) -> None:
        if parallel.rank == 1:
            release.wait(20)
        else:
            parallel.world.all_reduce(torch.zeros(1))

    start = time.monotonic()
    with pytest.raises(CollectiveError, match=r"no answer within 0.2 s from ranks \[1\]; rank 0 waits in world"):
        run_simulated(topology(2, 1), fn, timeout=timedelta(seconds=0.2))
    release.set()
    assert time.monotonic() - start < 5


def test_what_a_rank_brings_may_be_changed_as_soon_as_it_returns() -> None:
    def fn(parallel: ParallelState) -> list[float]:
        x, seen = torch.zeros(1000), []
        for step in range(30):
            x.fill_(step + parallel.rank)
            seen.append(float(parallel.world.all_reduce(x).mean()))
            x.fill_(torch.nan)
        return seen

    for seen in run_simulated(topology(3, 1), fn):
        assert seen == [3.0 * step + 3.0 for step in range(30)]


def test_the_record_has_every_call_and_its_bytes() -> None:
    simulation = Simulation(topology(2, 2))

    def fn(parallel: ParallelState) -> None:
        parallel.attn_dp.all_gather_row([1, 2, 3])
        parallel.attn_tp.all_reduce(torch.zeros(5, 4, dtype=torch.bfloat16))
        parallel.world.all_gather(torch.zeros(2, 3))
        parallel.world.reduce_scatter(torch.zeros(8, 3))
        counts = [parallel.rank] * 4
        parallel.world.all_to_all(torch.zeros(4 * parallel.rank, 2), counts, [0, 1, 2, 3])

    simulation.run(fn)
    for rank, calls in enumerate(simulation.calls):
        assert [(str(call), call.bytes_sent) for call in calls] == [
            ("attn_dp.all_gather_row int64[3]", 24),
            ("attn_tp.all_reduce bfloat16[5, 4]", 40),
            ("world.all_gather float32[2, 3]", 3 * 24),
            ("world.reduce_scatter float32[8, 3]", 3 * 24),
            (f"world.all_to_all float32[{4 * rank}, 2]", 3 * rank * 8),
        ]
