"""Ranks that share a target give what one rank gives, and the same bits as one another.

The worst fault would be ranks of one group whose logits differ in a last bit: they would accept different drafts.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from tests import fixtures
from tests.models.drafter_module import ModuleDrafter
from tests.models.tensor_parallel import (
    QWEN3,
    VOCAB,
    Passes,
    load_part,
    make_tensors,
    new_model,
    run_passes,
)
from tests.parallel.ranks import run_ranks
from torch import Tensor

from outrider.batch.expert_metadata import ExpertMetadata
from outrider.errors import CheckpointError
from outrider.layers.attention.interface import CausalMetadata, LayerKV
from outrider.layers.checkpoint import checkpoint_views
from outrider.models.drafter_checkpoint import load_drafter
from outrider.models.source import load_model
from outrider.models.weights import load_weights
from outrider.parallel.simulated import Simulation, run_simulated
from outrider.parallel.state import SINGLE_RANK, ParallelState
from outrider.parallel.topology import Topology

VARIANTS: dict[str, dict[str, Any]] = {
    "llama": {},
    "llama-tied": {"tie_word_embeddings": True},
    "llama-biases": {"attention_bias": True, "mlp_bias": True},
    "llama-mha": {"num_key_value_heads": 8},
    "qwen3": QWEN3,
    "qwen3-tied-biases": {**QWEN3, "tie_word_embeddings": True, "attention_bias": True},
}


def topology(dp: int, tp: int) -> Topology:
    return Topology(data_parallel_size=dp, tensor_parallel_size=tp, enable_expert_parallel=False)


def assert_close(got: Passes, want: Passes) -> None:
    assert got.logits_KV.shape == want.logits_KV.shape == (29, VOCAB)
    assert float(want.logits_KV.std()) > 0.1  # there is something to compare
    torch.testing.assert_close(got.logits_KV, want.logits_KV, rtol=0, atol=1e-5)
    torch.testing.assert_close(got.taps_NF, want.taps_NF, rtol=0, atol=1e-5)


@pytest.mark.parametrize("tp", [2, 4])
@pytest.mark.parametrize("variant", VARIANTS)
def test_logits_and_taps_equal_one_rank(variant: str, tp: int) -> None:
    changes = VARIANTS[variant]
    tensors = make_tensors(changes)
    want = run_passes(SINGLE_RANK, changes, tensors)
    ranks = run_simulated(topology(1, tp), lambda parallel: run_passes(parallel, changes, tensors))
    for got in ranks:
        assert_close(got, want)
        assert torch.equal(got.logits_KV, ranks[0].logits_KV)
        assert torch.equal(got.taps_NF, ranks[0].taps_NF)


def test_real_processes_do_the_same() -> None:
    changes = VARIANTS["llama-biases"]
    tensors = make_tensors(changes)
    first, second = run_ranks(topology(1, 2), run_passes, changes, tensors)
    assert_close(first, run_passes(SINGLE_RANK, changes, tensors))
    assert torch.equal(first.logits_KV, second.logits_KV)
    assert torch.equal(first.taps_NF, second.taps_NF)


@pytest.mark.parametrize("variant", ["llama", "qwen3-tied-biases"])
def test_the_ranks_parts_make_up_the_checkpoint(variant: str) -> None:
    """Each element of a sharded tensor is on one rank; the embedding, norms and row-parallel biases on every one."""
    changes = {**VARIANTS[variant], "mlp_bias": variant == "llama"}
    tensors = make_tensors(changes)
    ranks = run_simulated(topology(1, 4), lambda parallel: checkpoint_views(load_part(parallel, changes, tensors)))
    for name, tensor in tensors.items():
        views = [views[name.removeprefix("model.")] for views in ranks]
        held = torch.zeros_like(tensor)
        for view in views:
            held[view.part] += 1
            assert torch.equal(view.tensor, tensor[view.part])
        everywhere = re.search(r"norm|embed_tokens|(o_proj|down_proj)\.bias", name) is not None
        assert torch.equal(held, torch.full_like(held, 4.0 if everywhere else 1.0)), name


def test_what_a_rank_refuses_names_whole_shapes() -> None:
    tensors = make_tensors({})

    def refusal(parallel: ParallelState, given: dict[str, Tensor]) -> str:
        with pytest.raises(CheckpointError) as caught:
            load_weights(new_model(parallel, {}), given.items(), source="test", on_tensor=lambda: None)
        return str(caught.value)

    name = "model.layers.0.mlp.down_proj.weight"
    wrong = {**tensors, name: tensors[name][:, :12]}  # just what one of two ranks takes, had it been whole
    for text in run_simulated(topology(1, 2), lambda parallel: refusal(parallel, wrong)):
        assert f"{name!r} has shape (32, 12), but the config asks for (32, 24)" in text
    missing = {key: tensor for key, tensor in tensors.items() if "lm_head" not in key}
    for text in run_simulated(topology(1, 2), lambda parallel: refusal(parallel, missing)):
        assert f"1 missing tensors: lm_head.weight ({VOCAB}, 32)" in text


def test_the_drafter_is_whole_on_every_rank(tmp_path: Path) -> None:
    """It drafts the same bits as with one rank; for an untied head that takes one gather at load, and none later."""
    target_path = fixtures.make_rand_target(tmp_path / "target")
    drafter_path = fixtures.make_random_drafter(tmp_path / "drafter")
    features = torch.randn(9, 2 * fixtures.HIDDEN, generator=torch.Generator().manual_seed(0))

    def draft(parallel: ParallelState) -> tuple[list[int], Tensor]:
        target = load_model(str(target_path), parallel=parallel)
        loaded = load_drafter(
            drafter_path,
            target_config=target.config,
            embed_weight=target.model.embed_tokens.weight,
            lm_head_weight=target.model.lm_head.whole_weight(),
            parallel=parallel,
        )
        return ModuleDrafter(loaded).propose(features, 5)

    simulation = Simulation(topology(1, 2))
    want_ids, want_rows = draft(SINGLE_RANK)
    for ids, rows in simulation.run(draft):
        assert ids == want_ids
        assert torch.equal(rows, want_rows)
    for calls in simulation.calls:
        assert [str(call) for call in calls] == [
            f"attn_tp.all_gather float32[{fixtures.VOCAB // 2}, {fixtures.HIDDEN}]"
        ]


def test_a_tied_head_is_whole_without_a_collective() -> None:
    simulation = Simulation(topology(1, 2))

    def work(parallel: ParallelState) -> bool:
        model = new_model(parallel, {"tie_word_embeddings": True})
        return model.lm_head.whole_weight() is model.embed_tokens.weight

    assert simulation.run(work) == [True, True]
    assert simulation.calls == [[], []]


# ----------------------------------------------------------------------------------- the collectives of a pass

MOE = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "norm_topk_prob": True,
}


def calls_of_a_pass(changes: dict[str, Any], rows: tuple[int, int]) -> list[list[tuple[str, int]]]:
    """Name with shape, and bytes sent, of every collective of each rank of dp 2 x tp 2; ``rows`` per DP rank."""
    simulation = Simulation(topology(2, 2))
    tensors = make_tensors(changes)

    def work(parallel: ParallelState) -> None:
        model = load_part(parallel, changes, tensors)
        dp_rank = parallel.topology.dp_rank(parallel.rank)
        n = rows[dp_rank]
        kv = [LayerKV(torch.zeros(16, 2, 8), torch.zeros(16, 2, 8)) for _ in range(2)]
        metadata = CausalMetadata(
            query_start_loc_R1=torch.arange(n + 1, dtype=torch.int32),
            seq_lens_R=torch.ones(n, dtype=torch.int32),
            block_tables_RB=torch.arange(n, dtype=torch.int32)[:, None],
            slot_mapping_N=torch.arange(n) * 2,
            kv_block_size=2,
            max_query_len=min(n, 1),
            max_seq_len=min(n, 1),
        )
        experts = ExpertMetadata(
            dp_rank=dp_rank,
            padded_tokens=rows,
            num_tokens_non_padded=torch.tensor([n], dtype=torch.int32),
            mask_padded_tokens=True,
            captured=False,
        )
        with torch.inference_mode():
            output = model(torch.arange(n), torch.zeros(n, dtype=torch.int64), kv, metadata, (), experts)
            model.compute_logits(output.hidden_ND)

    simulation.run(work)
    return [[(str(call), call.bytes_sent) for call in calls] for calls in simulation.calls]


def test_the_collectives_of_a_dense_pass() -> None:
    """Two sums a layer and one gather of logits, within the attention group; nothing crosses DP ranks."""
    for rank, calls in enumerate(calls_of_a_pass({}, (5, 0))):
        n = (5, 5, 0, 0)[rank]
        layer = [(f"attn_tp.all_reduce float32[{n}, 32]", n * 32 * 4)] * 2
        assert calls == [*layer, *layer, (f"attn_tp.all_gather float32[{n}, {VOCAB // 2}]", n * VOCAB // 2 * 4)]


def test_the_collectives_of_a_pass_with_experts() -> None:
    """The rank without rows issues the same ones with the same extents, but for its own attention's and logits'."""
    for rank, calls in enumerate(calls_of_a_pass(MOE, (5, 0))):
        n = (5, 5, 0, 0)[rank]
        layer = [
            (f"attn_tp.all_reduce float32[{n}, 32]", n * 32 * 4),  # attention
            ("attn_dp.all_gather float32[5, 32]", 5 * 32 * 4),  # rows
            ("attn_dp.all_gather int32[5, 4]", 5 * 4 * 4),  # top-2 ids and weights
            ("attn_dp.reduce_scatter float32[10, 32]", 5 * 32 * 4),
            ("attn_tp.all_reduce float32[5, 32]", 5 * 32 * 4),
        ]
        assert calls == [*layer, *layer, (f"attn_tp.all_gather float32[{n}, {VOCAB // 2}]", n * VOCAB // 2 * 4)]
