"""One contract, two transports: threads that meet in memory, and processes that meet over gloo."""

from __future__ import annotations

import os
import time
from datetime import timedelta
from pathlib import Path

import pytest
import torch
from tests.parallel.collective_checks import check_all, tensor_of
from tests.parallel.ranks import RankFailure, run_ranks
from torch import Tensor

from outrider.errors import CollectiveError
from outrider.parallel.reduction import sum_in_rank_order
from outrider.parallel.simulated import run_simulated
from outrider.parallel.state import ParallelState
from outrider.parallel.topology import Topology
from outrider.parallel.torch_communicator import close_parallel, init_parallel


def topology(dp: int, tp: int) -> Topology:
    return Topology(data_parallel_size=dp, tensor_parallel_size=tp, enable_expert_parallel=True)


def assert_alike(results: list[list[list[Tensor]]], shape: Topology) -> None:
    """All ranks of a group have the same bits: they decide by them."""
    for rank, of_rank in enumerate(results):
        firsts = (0, shape.attn_tp_ranks(rank)[0], shape.attn_dp_ranks(rank)[0])
        for index, first in enumerate(firsts):
            for own, other in zip(of_rank[index], results[first][index], strict=True):
                assert torch.equal(own, other)


@pytest.mark.parametrize(("dp", "tp"), [(1, 1), (2, 1), (1, 2), (3, 1), (2, 2), (1, 4)])
def test_simulated_ranks(dp: int, tp: int) -> None:
    assert_alike(run_simulated(topology(dp, tp), check_all), topology(dp, tp))


@pytest.mark.parametrize(("dp", "tp"), [(1, 2), (2, 2)])
def test_real_ranks_give_the_bits_of_simulated_ones(dp: int, tp: int) -> None:
    shape = topology(dp, tp)
    real, simulated = run_ranks(shape, check_all), run_simulated(shape, check_all)
    assert_alike(real, shape)
    for a, b in zip(real, simulated, strict=True):
        assert all(torch.equal(x, y) for i in range(3) for x, y in zip(a[i], b[i], strict=True))


def test_an_element_of_a_sum_does_not_depend_on_its_neighbours() -> None:
    parts = [tensor_of(rank, 64, 48, torch.float32) for rank in range(4)]
    total = sum_in_rank_order(parts)
    for row in range(64):
        assert torch.equal(sum_in_rank_order([part[row : row + 1] for part in parts])[0], total[row])


def test_short_floats_are_summed_in_float32_and_rounded_once() -> None:
    parts = [torch.full((1, 1), value).bfloat16() for value in (256.0, 1.0, 1.0)]  # 256 + 1 is 256 in bfloat16
    assert sum_in_rank_order(parts).item() == 258.0
    assert parts[0].item() == 256.0  # what is summed is left alone


def reduce_or_not(parallel: ParallelState, how: str) -> None:
    if parallel.rank == 1 and how == "sleep":
        time.sleep(600)
    if parallel.rank == 1 and how == "exit":
        os._exit(3)
    parallel.world.all_reduce(torch.ones(3))


def test_a_rank_that_does_not_come_is_an_error_and_not_a_hang() -> None:
    start = time.monotonic()
    with pytest.raises(RankFailure, match=r"rank 0 failed[\s\S]*CollectiveError: world.all_reduce failed on rank 0"):
        run_ranks(topology(2, 1), reduce_or_not, "sleep", collective_timeout=timedelta(seconds=2))
    assert time.monotonic() - start < 200


def test_a_rank_that_dies_is_an_error_on_the_others() -> None:
    with pytest.raises(RankFailure, match=r"CollectiveError: world.all_reduce failed on rank 0|rank 1 .* exit code 3"):
        run_ranks(topology(2, 1), reduce_or_not, "exit")


def test_a_world_that_does_not_come_together_is_an_error(tmp_path: Path) -> None:
    place = f"file://{tmp_path / 'store'}"
    with pytest.raises(CollectiveError, match=rf"rank 0 of 2 could not join at {place}: "):
        init_parallel(topology(2, 1), 0, backend="gloo", init_method=place, timeout=timedelta(seconds=1))
    close_parallel()


def test_a_world_of_one_joins_nothing() -> None:
    state = init_parallel(topology(1, 1), 0, backend="gloo", init_method="file:///nowhere")
    assert (state.world.size, state.attn_tp.size, state.attn_dp.size) == (1, 1, 1)
