"""Every captured pass can be recorded as a CUDA graph: shown on fake CUDA tensors, over the start-up that captures it.

Nothing here runs on a GPU. What is shown: no captured pass reads a device tensor on the host, makes a shape of
contents, or touches the host's memory; with one rank, and with the collectives of data-parallel and tensor-parallel
ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from tests import fixtures
from tests.fake_cuda import CUDA, NOT_RECORDABLE, RecordableGraph, fake_cuda
from torch import Tensor
from torch.testing._internal.distributed.fake_pg import FakeStore

from outrider.batch.tiers import capture_sizes
from outrider.config import DrafterConfig, ModelConfig
from outrider.engine.capture import capture_tiers, describe_captured
from outrider.engine.setup import _kv_share
from outrider.layers.attention.interface import AttentionBackend, BlockMetadata, CausalMetadata, LayerKV
from outrider.layers.attention.registry import get_attention_backend
from outrider.layers.attention.static import StaticAttention
from outrider.layers.moe import SparseMoE
from outrider.layers.token_dispatcher import Routing
from outrider.models.decoder import Decoder
from outrider.models.drafter_checkpoint_config import read_drafter_config
from outrider.models.dspark import DSparkDrafter
from outrider.models.model_config import from_hf
from outrider.models.source import directory_config, read_json
from outrider.parallel.communicator import SingleRankCommunicator
from outrider.parallel.state import ParallelState
from outrider.parallel.topology import Topology
from outrider.parallel.torch_communicator import TorchCommunicator
from outrider.runner.batch_builder import BatchBuilder
from outrider.runner.cuda_graph_runner import CudaGraphRunner
from outrider.runner.kv_memory import allocate_kv, plan_kv_memory
from outrider.runner.model_runner import ModelRunner
from outrider.sampling.backend import TorchSampling
from outrider.spec_decode.dspark_proposer import DSparkProposer

MAX_LEN, SIZE = 48, 16
LAYOUT = plan_kv_memory(budget_bytes=8 * SIZE, kv_block_size=SIZE, target_bytes_per_token=1, drafter_bytes_per_token=0)


@dataclass(frozen=True, slots=True)
class Models:
    target: ModelConfig
    drafter: DrafterConfig


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Models]:
    """Shapes only: no weight is read."""
    root = tmp_path_factory.mktemp("drafters")
    moe_target = fixtures.make_moe_target(root / "target")
    dense, moe = (
        read_drafter_config(make(root / name))
        for name, make in (("dense", fixtures.make_random_drafter), ("moe", fixtures.make_moe_drafter))
    )
    return {
        "dense": Models(from_hf(fixtures.target_config()), dense),
        "moe": Models(_config(moe_target), moe),
    }


def _config(path: Path) -> ModelConfig:
    return directory_config(path, read_json(path / "config.json"))


@contextmanager
def ranks(dp: int, tp: int, *, expert_parallel: bool) -> Iterator[ParallelState]:
    """Rank 0 of a world whose collectives, over torch's own, move nothing."""
    topology = Topology(data_parallel_size=dp, tensor_parallel_size=tp, enable_expert_parallel=expert_parallel)
    if topology.world_size == 1:
        yield ParallelState.single(topology)
        return
    assert 1 in (dp, tp), "one group of several ranks"
    dist.init_process_group("fake", rank=0, world_size=topology.world_size, store=FakeStore())
    try:
        assert dist.group.WORLD is not None
        world, alone = TorchCommunicator(dist.group.WORLD, name="world"), SingleRankCommunicator()
        attn_tp, attn_dp = (world, alone) if tp > 1 else (alone, world)
        yield ParallelState(topology=topology, rank=0, world=world, attn_tp=attn_tp, attn_dp=attn_dp)
    finally:
        dist.destroy_process_group()


def capture(
    models: Models,
    parallel: ParallelState,
    *,
    max_num_seqs: int,
    backend: AttentionBackend | None = None,
    masked: bool = False,
) -> CudaGraphRunner:
    """What a start-up on a CUDA device does, on fake tensors: models, pools, and every tier's passes."""
    backend = backend or get_attention_backend("auto", device=CUDA)
    with fake_cuda():
        target = Decoder(models.target, parallel=parallel, backend=backend, dtype=torch.bfloat16, device=CUDA)
        drafter = DSparkDrafter(
            models.drafter,
            embedding_VD=target.embed_tokens.weight,
            lm_head_VD=target.lm_head.whole_weight(),
            draft_to_target_V=torch.arange(models.drafter.draft_vocab_size),
            backend=backend,
            parallel=parallel,
            dtype=torch.bfloat16,
            device=CUDA,
        )
        graphs = CudaGraphRunner(capture_sizes(max_num_seqs), device=CUDA, new_graph=RecordableGraph)
        builder = BatchBuilder(rank=0, kv_block_size=SIZE, max_model_len=MAX_LEN, mask_padded_tokens=masked)
        target_kv, drafter_kv = (
            allocate_kv(config, LAYOUT, dtype="bfloat16", device=CUDA)
            for config in (_kv_share(models.target, parallel.topology), models.drafter.decoder)
        )
        proposer = DSparkProposer(
            drafter=drafter,
            config=models.drafter,
            num_speculative_tokens=models.drafter.num_speculative_tokens,
            kv_caches=drafter_kv,
            builder=builder,
            graphs=graphs,
            sampling=TorchSampling(),
        )
        runner = ModelRunner(target=target, kv_caches=target_kv, tap_layer_ids=proposer.tap_layer_ids, graphs=graphs)
        capture_tiers(
            graphs=graphs,
            runner=runner,
            proposer=proposer,
            builder=builder,
            num_dp_ranks=parallel.attn_dp.size,
            max_num_seqs=max_num_seqs,
            show_progress=False,
        )
    return graphs


def test_start_up_records_all_27_tiers_of_both_models(models: dict[str, Models]) -> None:
    graphs = capture(models["dense"], ParallelState.single(), max_num_seqs=64)
    assert describe_captured(graphs) == "target 27/27, draft 27/27"


@pytest.mark.parametrize("kind", ["dense", "moe"])
@pytest.mark.parametrize(
    ("dp", "tp", "expert_parallel"),
    [(1, 1, False), (2, 1, False), (2, 1, True), (1, 2, False), (1, 2, True)],
    ids=["one rank", "dp 2", "dp 2 ep", "tp 2", "tp 2 ep"],
)
def test_every_pass_can_be_recorded(
    kind: str, dp: int, tp: int, expert_parallel: bool, models: dict[str, Models]
) -> None:
    """The MoE target has a dense and three expert layers, its drafter experts in both of its layers."""
    with ranks(dp, tp, expert_parallel=expert_parallel) as parallel:
        graphs = capture(models[kind], parallel, max_num_seqs=2, masked=expert_parallel)
    assert describe_captured(graphs) == "target 2/2, draft 2/2"


@pytest.mark.parametrize("rope_type", ["dynamic", "yarn", "llama3", "linear"])
def test_every_kind_of_rotary_embedding_can_be_recorded(rope_type: str, models: dict[str, Models]) -> None:
    rope = replace(
        models["dense"].target.rope,
        rope_type=rope_type,  # type: ignore[arg-type]
        factor=2.0,
        original_max_position_embeddings=512,
    )
    target = replace(models["dense"].target, rope=rope)
    graphs = capture(replace(models["dense"], target=target), ParallelState.single(), max_num_seqs=1)
    assert len(graphs.captured_keys) == 2


# ------------------------------------------------------------------------- what cannot be recorded is found out


def item(metadata: CausalMetadata) -> None:
    metadata.seq_lens_R.max().item()


def truth(metadata: CausalMetadata) -> None:
    bool((metadata.slot_mapping_N >= 0).all())


def as_list(metadata: CausalMetadata) -> None:
    metadata.query_start_loc_R1.tolist()


def to_host(metadata: CausalMetadata) -> None:
    metadata.seq_lens_R.cpu()


def from_host(metadata: CausalMetadata) -> None:
    torch.tensor([1, 2], device=metadata.seq_lens_R.device)


def made_of_contents(metadata: CausalMetadata) -> None:
    torch.bincount(metadata.seq_lens_R)


@pytest.mark.parametrize("peek", [item, truth, as_list, to_host, from_host, made_of_contents])
def test_a_host_access_in_a_pass_is_found(peek: Callable[[CausalMetadata], None], models: dict[str, Models]) -> None:
    class Peeking(StaticAttention):
        def causal(self, query_NHD: Tensor, kv: LayerKV, metadata: CausalMetadata, *, scale: float) -> Tensor:
            peek(metadata)
            return super().causal(query_NHD, kv, metadata, scale=scale)

    with pytest.raises(NOT_RECORDABLE):
        capture(models["dense"], ParallelState.single(), max_num_seqs=1, backend=Peeking())


def test_a_host_access_in_a_draft_pass_is_found(models: dict[str, Models]) -> None:
    class Peeking(StaticAttention):
        def block(
            self,
            query_NHD: Tensor,
            kv: LayerKV,
            metadata: BlockMetadata,
            *,
            key_NHD: Tensor,
            value_NHD: Tensor,
            scale: float,
        ) -> Tensor:
            metadata.context_lens_R.max().item()
            return super().block(query_NHD, kv, metadata, key_NHD=key_NHD, value_NHD=value_NHD, scale=scale)

    with pytest.raises(NOT_RECORDABLE):
        capture(models["dense"], ParallelState.single(), max_num_seqs=1, backend=Peeking())


def test_the_reference_back_end_cannot_be_recorded(models: dict[str, Models]) -> None:
    with pytest.raises(NOT_RECORDABLE):
        capture(models["dense"], ParallelState.single(), max_num_seqs=1, backend=get_attention_backend("reference"))


def test_rows_sorted_by_expert_cannot_be_recorded(models: dict[str, Models], monkeypatch: pytest.MonkeyPatch) -> None:
    def sorted_share(self: SparseMoE, x_MD: Tensor, routing: Routing) -> Tensor:
        return self._share(x_MD, routing, static=False)

    monkeypatch.setattr(SparseMoE, "_static_share", sorted_share)
    with pytest.raises(NOT_RECORDABLE):
        capture(models["moe"], ParallelState.single(), max_num_seqs=1)
