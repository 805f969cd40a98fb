"""Rank arithmetic: groups partition the world, whatever its sizes, and what does not divide is refused by name."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests import fixtures

from outrider.config import ModelConfig, MoEConfig
from outrider.errors import ConfigError
from outrider.models.model_config import from_hf
from outrider.parallel.topology import Topology

SIZES = st.integers(1, 24)
TARGET = from_hf(fixtures.target_config())


def topology(dp: int, tp: int, *, ep: bool = False) -> Topology:
    return Topology(data_parallel_size=dp, tensor_parallel_size=tp, enable_expert_parallel=ep)


def with_experts(num_experts: int, moe_intermediate_size: int) -> ModelConfig:
    moe = MoEConfig(
        num_experts=num_experts,
        num_experts_per_tok=1,
        moe_intermediate_size=moe_intermediate_size,
        norm_topk_prob=True,
        sparse_layers=(True,) * TARGET.num_layers,
    )
    return replace(TARGET, moe=moe)


@given(dp=SIZES, tp=SIZES)
def test_groups_partition_the_world(dp: int, tp: int) -> None:
    shape = topology(dp, tp)
    ranks = range(shape.world_size)
    for groups, count, size in (
        ({shape.attn_tp_ranks(rank) for rank in ranks}, dp, tp),
        ({shape.attn_dp_ranks(rank) for rank in ranks}, tp, dp),
    ):
        assert len(groups) == count
        assert all(len(group) == size and list(group) == sorted(group) for group in groups)
        assert sorted(rank for group in groups for rank in group) == list(ranks)
    for rank in ranks:
        assert rank == shape.dp_rank(rank) * tp + shape.tp_rank(rank)
        assert shape.attn_tp_ranks(rank)[shape.tp_rank(rank)] == rank
        assert shape.attn_dp_ranks(rank)[shape.dp_rank(rank)] == rank  # index in the group = dp_rank
        assert set(shape.attn_tp_ranks(rank)) & set(shape.attn_dp_ranks(rank)) == {rank}


@given(dp=SIZES, tp=SIZES)
def test_one_leader_a_data_parallel_rank(dp: int, tp: int) -> None:
    shape = topology(dp, tp)
    leaders = [rank for rank in range(shape.world_size) if shape.is_leader(rank)]
    assert [shape.dp_rank(rank) for rank in leaders] == list(range(dp))


def test_ranks_are_numbered_dp_major() -> None:
    shape = topology(2, 3)
    assert [(shape.dp_rank(rank), shape.tp_rank(rank)) for rank in range(6)] == [
        (0, 0), (0, 1), (0, 2), (1, 0), (1, 1), (1, 2),
    ]  # fmt: skip
    assert shape.attn_tp_ranks(4) == (3, 4, 5)
    assert shape.attn_dp_ranks(4) == (1, 4)


@pytest.mark.parametrize("name", ["data_parallel_size", "tensor_parallel_size"])
def test_sizes_below_one_are_refused(name: str) -> None:
    with pytest.raises(ConfigError, match=f"{name}=0 must be at least 1"):
        replace(topology(1, 1), **{name: 0})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("tp", "changes", "message"),
    [
        (3, {}, "tensor_parallel_size=3 does not divide the model's num_heads=4"),
        (4, {}, "tensor_parallel_size=4 does not divide the model's num_kv_heads=2"),
        (2, {"intermediate_size": 127}, "tensor_parallel_size=2 does not divide the model's intermediate_size=127"),
        (2, {"vocab_size": 63}, "tensor_parallel_size=2 does not divide the model's vocab_size=63"),
    ],
)
def test_shapes_that_do_not_divide_are_refused_by_name(tp: int, changes: dict[str, int], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        topology(1, tp).check_target(replace(TARGET, **changes))  # type: ignore[arg-type]


def test_experts_that_do_not_divide_are_refused_by_name() -> None:
    with pytest.raises(ConfigError, match=r"num_experts=6 of the target does not divide by the 4 ranks"):
        topology(2, 2, ep=True).check_target(with_experts(6, 32))
    with pytest.raises(ConfigError, match=r"moe_intermediate_size=6 of the target does not divide by the 4 ranks"):
        topology(4, 1).check_target(with_experts(8, 6))


def test_what_divides_is_accepted() -> None:
    topology(8, 2).check_target(TARGET)
    topology(2, 2, ep=True).check_target(with_experts(8, 6))  # whole experts: their size need not divide
    topology(4, 1).check_target(with_experts(6, 32))
