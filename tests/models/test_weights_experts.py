"""Expert tensors in every layout a file may have, on ranks that hold whole experts or slices of all of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from tests.models.test_decoder import QWEN3_MOE, oracle
from torch import Tensor
from transformers import PreTrainedModel

from outrider.config import ModelConfig
from outrider.errors import CheckpointError
from outrider.layers.attention.reference import ReferenceAttention
from outrider.layers.checkpoint import checkpoint_views
from outrider.models.decoder import Decoder
from outrider.models.inspection import inspect_path
from outrider.models.model_config import from_hf
from outrider.models.registry import build_model
from outrider.models.weights import check_size, load_weights
from outrider.models.weights_experts import tensor_parts
from outrider.models.weights_safetensors import open_safetensors
from outrider.parallel.simulated import run_simulated
from outrider.parallel.state import SINGLE_RANK, ParallelState
from outrider.parallel.topology import Topology

MODELS = {
    "mixtral": ("mixtral", {"num_local_experts": 8, "num_experts_per_tok": 2}),
    "qwen3_moe": ("qwen3_moe", {**QWEN3_MOE, "num_experts_per_tok": 2, "mlp_only_layers": [1]}),
}
EXPERTS = 8


@pytest.fixture(params=MODELS)
def theirs(request: pytest.FixtureRequest) -> PreTrainedModel:
    return oracle(*MODELS[request.param])


def write(theirs: PreTrainedModel, path: Path, *, stacked: bool) -> Path:
    """One tensor an expert and matrix, under the family's own names, or all experts of a layer stacked."""
    theirs.save_pretrained(path, save_original_format=not stacked)
    return path


def load(path: Path, config: ModelConfig, parallel: ParallelState) -> Decoder:
    model = build_model(config, parallel=parallel, backend=ReferenceAttention(), dtype=torch.float32, device="cpu")
    load_weights(model, open_safetensors(path), source="test", on_tensor=lambda: None)
    return model


@pytest.mark.parametrize("stacked", [False, True])
def test_both_layouts_fill_the_same_model(theirs: PreTrainedModel, stacked: bool, tmp_path: Path) -> None:
    path, config = write(theirs, tmp_path, stacked=stacked), from_hf(theirs.config)
    views = checkpoint_views(load(path, config, SINGLE_RANK))
    for layer, sparse in enumerate(config.moe.sparse_layers if config.moe else ()):
        if not sparse:
            continue
        stored = theirs.get_submodule(f"model.layers.{layer}.mlp.experts")
        for expert in range(EXPERTS):
            gate, up = stored.gate_up_proj[expert].chunk(2)
            for name, want in (("gate_proj", gate), ("up_proj", up), ("down_proj", stored.down_proj[expert])):
                assert torch.equal(views[f"layers.{layer}.mlp.experts.{expert}.{name}.weight"].tensor, want)
    inspection = inspect_path(str(path))
    assert inspection.loadable
    assert inspection.used.keys() == views.keys()


@pytest.mark.parametrize("stacked", [False, True])
@pytest.mark.parametrize("expert_parallel", [False, True])
def test_ranks_take_their_own_part_and_all_of_them_make_up_the_checkpoint(
    theirs: PreTrainedModel, expert_parallel: bool, stacked: bool, tmp_path: Path
) -> None:
    path, config = write(theirs, tmp_path, stacked=stacked), from_hf(theirs.config)
    whole = checkpoint_views(load(path, config, SINGLE_RANK))
    topology = Topology(data_parallel_size=2, tensor_parallel_size=2, enable_expert_parallel=expert_parallel)
    ranks = run_simulated(topology, lambda parallel: checkpoint_views(load(path, config, parallel)))
    for name, view in whole.items():
        if ".experts." not in name:
            continue
        parts = [rank[name].tensor for rank in ranks if rank[name].tensor.numel()]
        if expert_parallel:
            assert len(parts) == 1, name
            assert torch.equal(parts[0], view.tensor), name
            owner = next(rank for rank, views in enumerate(ranks) if views[name].tensor.numel())
            assert owner == int(name.split(".experts.")[1].split(".")[0]) // (EXPERTS // 4)
        else:
            assert len(parts) == 4, name
            assert torch.equal(torch.cat(parts, dim=1 if "down_proj" in name else 0), view.tensor), name


class Counting:
    """A stored tensor that notes how many elements were read of it."""

    def __init__(self, tensor: Tensor, read: list[int]) -> None:
        self._tensor, self._read = tensor, read

    @property
    def shape(self) -> Sequence[int]:
        return self._tensor.shape

    def __getitem__(self, index: tuple[slice, ...]) -> Tensor:
        part = self._tensor[index]
        self._read.append(part.numel())
        return part


@pytest.mark.parametrize("expert_parallel", [False, True])
def test_no_rank_reads_what_others_hold(theirs: PreTrainedModel, expert_parallel: bool) -> None:
    config = from_hf(theirs.config)
    topology = Topology(data_parallel_size=4, tensor_parallel_size=1, enable_expert_parallel=expert_parallel)

    def work(parallel: ParallelState) -> int:
        read: list[int] = []
        model = build_model(config, parallel=parallel, backend=ReferenceAttention(), dtype=torch.float32, device="cpu")
        stored = [
            (name, Counting(tensor, read if ".experts." in name else []))
            for name, tensor in theirs.state_dict().items()
        ]
        load_weights(model, stored, source="test", on_tensor=lambda: None)
        return sum(read)

    total = sum(tensor.numel() for name, tensor in theirs.state_dict().items() if ".experts." in name)
    assert run_simulated(topology, work) == [total // 4] * 4


Change = Callable[[dict[str, Tensor]], None]
STACKED, ROUTER = "model.layers.2.mlp.experts.gate_up_proj", "model.layers.2.mlp.gate.weight"


def _one_expert_more(tensors: dict[str, Tensor]) -> None:
    tensors[STACKED] = torch.cat((tensors[STACKED], tensors[STACKED][:1]))


def _one_expert_less(tensors: dict[str, Tensor]) -> None:
    tensors[STACKED] = tensors[STACKED][:-1]


def _narrower(tensors: dict[str, Tensor]) -> None:
    tensors[STACKED] = tensors[STACKED][:, 2:]


def _twice(tensors: dict[str, Tensor]) -> None:
    tensors["model.layers.2.mlp.experts.3.up_proj.weight"] = tensors[STACKED][3].chunk(2)[1].clone()


def _no_router(tensors: dict[str, Tensor]) -> None:
    del tensors[ROUTER]


def _small_router(tensors: dict[str, Tensor]) -> None:
    tensors[ROUTER] = tensors[ROUTER][:4]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (_one_expert_more, r"unexpected tensor 'model\.layers\.2\.mlp\.experts\.gate_up_proj' of shape \(9,"),
        (_one_expert_less, r"2 missing tensors: layers\.2\.mlp\.experts\.7\.gate_proj\.weight"),
        (_narrower, r"gate_up_proj' has shape .*which gives '.*experts\.0\.gate_proj\.weight' the shape"),
        (_twice, r"experts\.(3\.up_proj\.weight|gate_up_proj)' appears more than once"),
        (_no_router, r"1 missing tensors: layers\.2\.mlp\.gate\.weight \(8, 32\)"),
        (_small_router, r"mlp\.gate\.weight' has shape \(4, 32\), but the config asks for \(8, 32\)"),
    ],
)
@pytest.mark.parametrize("expert_parallel", [False, True])
def test_every_expert_is_accounted_for_on_every_rank(
    expert_parallel: bool, change: Change, message: str, tmp_path: Path
) -> None:
    """Also by the ranks that hold none of what is wrong."""
    theirs = oracle(*MODELS["qwen3_moe"])
    tensors = {name: tensor.clone() for name, tensor in theirs.state_dict().items()}
    change(tensors)
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, tmp_path / "model.safetensors")
    topology = Topology(data_parallel_size=2, tensor_parallel_size=1, enable_expert_parallel=expert_parallel)

    def work(parallel: ParallelState) -> str:
        with pytest.raises(CheckpointError, match=message) as caught:
            load(tmp_path, from_hf(theirs.config), parallel)
        return str(caught.value)

    assert len(set(run_simulated(topology, work))) == 1


def test_names() -> None:
    def names(name: str, *shape: int) -> list[tuple[str, tuple[int, ...]]]:
        return [(part.name, part.shape) for part in tensor_parts(name, shape)]

    assert names("layers.3.block_sparse_moe.gate.weight", 8, 32) == [("layers.3.mlp.gate.weight", (8, 32))]
    w3 = "layers.0.block_sparse_moe.experts.11.w3.weight"
    assert names(w3, 4, 32) == [("layers.0.mlp.experts.11.up_proj.weight", (4, 32))]
    assert names("layers.0.mlp.experts.1.down_proj.weight", 3, 4)[0][0] == "layers.0.mlp.experts.1.down_proj.weight"
    stacked = names("layers.0.mlp.experts.gate_up_proj", 2, 6, 5)
    assert [name.rsplit(".experts.")[1] for name, _ in stacked] == [
        "0.gate_proj.weight", "0.up_proj.weight", "1.gate_proj.weight", "1.up_proj.weight",
    ]  # fmt: skip
    assert {shape for _, shape in stacked} == {(3, 5)}
    assert names("layers.0.mlp.gate_proj.weight", 3, 4) == [("layers.0.mlp.gate_proj.weight", (3, 4))]


def test_a_config_with_more_experts_than_the_file_could_hold_is_refused_before_memory_is_asked_for() -> None:
    config = from_hf(oracle(*MODELS["mixtral"]).config)
    check_size(config, stored_bytes=100_000, source="test")
    with pytest.raises(CheckpointError, match=r"num_experts=8, moe_intermediate_size=40"):
        check_size(config, stored_bytes=1_000, source="test")
