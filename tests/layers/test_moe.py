"""Expert layers on simulated ranks: every topology and transport gives the one-rank result, and load is exact.

The reference is written row by row in fp64, from the published formula. Padding rows hold NaN, so that one which
reaches another row's result, or an index, shows it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from outrider.batch.expert_metadata import ExpertMetadata
from outrider.config import All2AllBackend, MoEConfig
from outrider.errors import ConfigError
from outrider.layers.checkpoint import checkpoint_views
from outrider.layers.moe import SparseMoE
from outrider.parallel.recording import CollectiveCall
from outrider.parallel.simulated import Simulation
from outrider.parallel.state import SINGLE_RANK, ParallelState
from outrider.parallel.topology import Topology

HIDDEN = 8
MOE = MoEConfig(
    num_experts=16, num_experts_per_tok=3, moe_intermediate_size=16, norm_topk_prob=True, sparse_layers=(True,)
)
TOPOLOGIES = [(dp, tp) for dp in (1, 2, 4) for tp in (1, 2, 4)]
Mode = Literal["slices", "gather", "alltoall"]
MODES: tuple[Mode, ...] = ("slices", "gather", "alltoall")


def topology(dp: int, tp: int, mode: Mode) -> Topology:
    backend: All2AllBackend = "alltoall" if mode == "alltoall" else "allgather_reducescatter"
    return Topology(
        data_parallel_size=dp,
        tensor_parallel_size=tp,
        enable_expert_parallel=mode != "slices",
        all2all_backend=backend,
    )


def weights(moe: MoEConfig = MOE, *, seed: int = 0) -> dict[str, Tensor]:
    """A checkpoint's tensors. The router's rows differ in size, so that experts are loaded unevenly."""
    generator = torch.Generator().manual_seed(seed)
    inner = moe.moe_intermediate_size
    tensors = {"gate.weight": torch.randn(moe.num_experts, HIDDEN, generator=generator)}
    tensors["gate.weight"] *= torch.linspace(0.2, 2.0, moe.num_experts)[:, None]
    for e in range(moe.num_experts):
        for name, rows, columns in (
            ("gate_proj", inner, HIDDEN), ("up_proj", inner, HIDDEN), ("down_proj", HIDDEN, inner),
        ):  # fmt: skip
            tensors[f"experts.{e}.{name}.weight"] = torch.randn(rows, columns, generator=generator) * 0.4
    return tensors


def make(parallel: ParallelState, tensors: dict[str, Tensor], moe: MoEConfig = MOE) -> SparseMoE:
    module = SparseMoE(HIDDEN, moe, parallel=parallel)
    views = checkpoint_views(module)
    assert views.keys() == tensors.keys()
    with torch.no_grad():
        for name, view in views.items():
            view.copy_(tensors[name])
    return module.requires_grad_(False)


def expected(x_ND: Tensor, tensors: dict[str, Tensor], moe: MoEConfig = MOE) -> tuple[Tensor, Tensor]:
    """fp64 [N, D], and the router's choice counted, int64 [num_experts]."""
    load = torch.zeros(moe.num_experts, dtype=torch.int64)
    out = []
    for x in x_ND.double():
        probabilities = (tensors["gate.weight"].double() @ x).softmax(dim=0)
        chosen = probabilities.argsort(descending=True)[: moe.num_experts_per_tok].tolist()
        total = sum(float(probabilities[e]) for e in chosen) if moe.norm_topk_prob else 1.0
        mixed = torch.zeros(HIDDEN, dtype=torch.float64)
        for e in chosen:
            gate, up, down = (
                tensors[f"experts.{e}.{name}.weight"].double() for name in ("gate_proj", "up_proj", "down_proj")
            )
            mixed += float(probabilities[e]) / total * (down @ (F.silu(gate @ x) * (up @ x)))
            load[e] += 1
        out.append(mixed)
    return torch.stack(out) if out else torch.zeros(0, HIDDEN, dtype=torch.float64), load


@dataclass(frozen=True, slots=True)
class Ran:
    results: list[Tensor]  # per rank, real rows
    load: Tensor  # [ranks, num_experts]
    calls: list[list[CollectiveCall]]


def run(
    shape: Topology, rows: Sequence[Tensor], *, extent: int = 0, mask: bool = True, tensors: dict[str, Tensor]
) -> Ran:
    """One pass; ``rows`` per DP rank, each padded with NaN to ``extent`` (a tier) or not at all (0)."""
    padded = tuple(max(extent, len(x)) for x in rows)

    def work(parallel: ParallelState) -> tuple[Tensor, Tensor]:
        module = make(parallel, tensors)
        own = rows[parallel.attn_dp.rank]
        experts = ExpertMetadata(
            dp_rank=parallel.attn_dp.rank,
            padded_tokens=padded,
            num_tokens_non_padded=torch.tensor([len(own)], dtype=torch.int32),
            mask_padded_tokens=mask,
            captured=extent > 0,
        )
        filled = F.pad(own, (0, 0, 0, padded[parallel.attn_dp.rank] - len(own)), value=torch.nan)
        out_ND = module(filled, experts)
        assert out_ND.shape == filled.shape
        return out_ND[: len(own)], module.expert_load

    simulation = Simulation(shape)
    ran = simulation.run(work)
    return Ran([out for out, _ in ran], torch.stack([load for _, load in ran]), simulation.calls)


def check(shape: Topology, counts: Sequence[int], *, extent: int, mask: bool, seed: int = 1) -> None:
    tensors = weights()
    generator = torch.Generator().manual_seed(seed)
    rows = [torch.randn(n, HIDDEN, generator=generator) for n in counts]
    ran = run(shape, rows, extent=extent, mask=mask, tensors=tensors)
    for rank, got in enumerate(ran.results):
        want, _ = expected(rows[shape.dp_rank(rank)], tensors)
        torch.testing.assert_close(got.double(), want, rtol=0, atol=1e-5)
        assert torch.equal(got, ran.results[shape.attn_tp_ranks(rank)[0]]), "ranks that share requests differ"
    _, load = expected(torch.cat(rows), tensors)
    assert int(load.sum()) == sum(counts) * MOE.num_experts_per_tok
    per_rank = ran.load if shape.enable_expert_parallel else ran.load / shape.world_size
    if mask or not extent:
        assert torch.equal(per_rank.sum(dim=0), load.to(per_rank.dtype))
    else:
        assert int(per_rank.sum()) == len(counts) * extent * MOE.num_experts_per_tok


def test_one_rank_is_the_formula() -> None:
    for norm in (True, False):
        for k in (1, 2, 4):
            moe = MoEConfig(
                num_experts=4,
                num_experts_per_tok=k,
                moe_intermediate_size=6,
                norm_topk_prob=norm,
                sparse_layers=(True,),
            )
            tensors = weights(moe, seed=k)
            x_ND = torch.randn(11, HIDDEN, generator=torch.Generator().manual_seed(k))
            module = make(SINGLE_RANK, tensors, moe)
            want, load = expected(x_ND, tensors, moe)
            got = module(x_ND, ExpertMetadata.single(11))
            torch.testing.assert_close(got.double(), want, rtol=0, atol=1e-5)
            assert torch.equal(module.expert_load, load)
            module(x_ND, ExpertMetadata.single(11))
            assert torch.equal(module.expert_load, 2 * load)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(("dp", "tp"), TOPOLOGIES)
def test_every_topology_gives_the_one_rank_result(dp: int, tp: int, mode: Mode) -> None:
    shape = topology(dp, tp, mode)
    idle_but_last = [0] * (dp - 1) + [5]
    mixed = [3, 0, 7, 1][:dp]
    for counts in (mixed, idle_but_last, [0] * dp):
        check(shape, counts, extent=0, mask=True)
    for mask in (True, False):
        check(shape, mixed, extent=8, mask=mask)


@given(data=st.data())
@settings(max_examples=20, deadline=None)
def test_any_counts(data: st.DataObject) -> None:
    dp, tp = data.draw(st.sampled_from(TOPOLOGIES[:-1]))
    counts = data.draw(st.lists(st.integers(0, 9), min_size=dp, max_size=dp))
    tier = data.draw(st.booleans())
    check(
        topology(dp, tp, data.draw(st.sampled_from(MODES))),
        counts,
        extent=max(1, *counts) + data.draw(st.integers(0, 3)) if tier else 0,
        mask=data.draw(st.booleans()),
        seed=data.draw(st.integers(0, 99)),
    )


def test_results_do_not_depend_on_who_is_beside() -> None:
    """The same row, alone and among many."""
    tensors = weights()
    rows = [torch.randn(n, HIDDEN, generator=torch.Generator().manual_seed(n)) for n in (4, 9)]
    for mode in MODES:
        both = run(topology(2, 1, mode), rows, tensors=tensors)
        alone = run(topology(2, 1, mode), [rows[0], rows[1][:0]], tensors=tensors)
        torch.testing.assert_close(both.results[0], alone.results[0], rtol=0, atol=1e-6)


def names(calls: list[CollectiveCall]) -> list[str]:
    return [f"{call.group}.{call.name} {list(call.shape)}" for call in calls]


def test_the_collectives_of_a_layer() -> None:
    tensors, k = weights(), MOE.num_experts_per_tok
    rows = [torch.randn(n, HIDDEN, generator=torch.Generator().manual_seed(n)) for n in (5, 2)]
    for mode in ("slices", "gather"):
        ran = run(topology(2, 2, mode), rows, tensors=tensors)
        for calls in ran.calls:
            assert names(calls) == [
                f"attn_dp.all_gather [5, {HIDDEN}]",
                f"attn_dp.all_gather [5, {2 * k}]",
                f"attn_dp.reduce_scatter [10, {HIDDEN}]",
                f"attn_tp.all_reduce [5, {HIDDEN}]",
            ]
    ran = run(topology(2, 2, "alltoall"), rows, tensors=tensors)
    experts_per_rank = MOE.num_experts // 4
    for rank, calls in enumerate(ran.calls):
        part = [rows[0][:3], rows[0][3:], rows[1][:1], rows[1][1:]][rank]
        chosen_Nk = (part @ tensors["gate.weight"].T).topk(k, dim=1).indices
        sent = sum(len({e // experts_per_rank for e in row}) for row in chosen_Nk.tolist())
        assert names(calls)[:3] == [
            "world.all_to_all [4]",
            f"world.all_to_all [{sent}, {HIDDEN}]",
            f"world.all_to_all [{sent}, {2 * k}]",
        ]
        assert [f"{call.group}.{call.name}" for call in calls[3:]] == ["world.all_to_all", "attn_tp.all_gather"]


def test_a_captured_pass_never_sends_by_counts() -> None:
    rows = [torch.randn(n, HIDDEN) for n in (3, 0)]
    captured = run(topology(2, 1, "alltoall"), rows, extent=4, tensors=weights())
    eager = run(topology(2, 1, "alltoall"), rows, tensors=weights())
    assert not any(call.name == "all_to_all" for calls in captured.calls for call in calls)
    assert all(any(call.name == "all_to_all" for call in calls) for calls in eager.calls)


def test_one_rank_issues_no_collective() -> None:
    simulation = Simulation(topology(1, 1, "alltoall"))
    simulation.run(lambda parallel: make(parallel, weights())(torch.randn(3, HIDDEN), ExpertMetadata.single(3)))
    assert simulation.calls == [[]]


def test_alltoall_needs_whole_experts() -> None:
    with pytest.raises(ConfigError, match=r"all2all_backend='alltoall' needs enable_expert_parallel"):
        Topology(data_parallel_size=2, tensor_parallel_size=1, enable_expert_parallel=False, all2all_backend="alltoall")


@pytest.mark.parametrize("mode", ["slices", "gather"])
def test_the_static_way_gives_what_the_sorted_way_gives(mode: Mode) -> None:
    """On each rank's part of the experts; masked rows hold NaN, and there are ids that other ranks hold."""
    tensors, shape = weights(), topology(2, 2, mode)
    x_ND = torch.randn(9, HIDDEN, generator=torch.Generator().manual_seed(5))
    x_ND[7:] = torch.nan
    pass_ = ExpertMetadata(
        dp_rank=0,
        padded_tokens=(9, 9),
        num_tokens_non_padded=torch.tensor([7], dtype=torch.int32),
        mask_padded_tokens=True,
        captured=True,
    )

    def work(parallel: ParallelState) -> int:
        module = make(parallel, tensors)
        routing = module.experts.placement.localised(module.route(x_ND, pass_))
        (expected_ND, load), (got_ND, got_load) = (module.experts(x_ND, routing, static=s) for s in (False, True))
        torch.testing.assert_close(got_ND, expected_ND, rtol=0, atol=1e-5)
        assert torch.equal(got_load, load)
        assert torch.equal(got_ND[7:], torch.zeros(2, HIDDEN))
        return int(load.sum())

    rows = sum(Simulation(shape).run(work))
    assert rows == 7 * MOE.num_experts_per_tok * (1 if shape.enable_expert_parallel else 4)


def test_bf16_rows_and_weights() -> None:
    tensors = weights()
    x_ND = torch.randn(20, HIDDEN, generator=torch.Generator().manual_seed(3))
    module = SparseMoE(HIDDEN, MOE, parallel=SINGLE_RANK, dtype=torch.bfloat16)
    with torch.no_grad():
        for name, view in checkpoint_views(module).items():
            view.copy_(tensors[name])
        got = module(x_ND.bfloat16(), ExpertMetadata.single(20))
    rounded = {name: tensor.bfloat16().float() for name, tensor in tensors.items()}
    want, _ = expected(x_ND.bfloat16(), rounded)
    assert got.dtype == torch.bfloat16
    assert float((got.double() - want).norm() / want.norm()) < 0.02
