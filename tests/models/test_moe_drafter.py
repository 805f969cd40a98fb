"""A drafter with expert layers, and its target: against transformers and the dense reference; every tensor placed."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests import fixtures
from tests.models.drafter_module import ModuleDrafter, load_for
from tests.paged import PagedSequences
from tests.reference_drafter import ReferenceDrafter, ReferenceTarget
from torch import Tensor
from typer.testing import CliRunner

from outrider.cli.main import build_app
from outrider.config import MoEConfig
from outrider.errors import CheckpointError
from outrider.layers.checkpoint import checkpoint_views
from outrider.layers.moe import SparseMoE
from outrider.models.drafter_checkpoint_config import DrafterFormat, read_drafter_config
from outrider.models.drafter_checkpoint_save import save_drafter
from outrider.models.inspection import inspect_path
from outrider.models.source import load_model

TOKENS = [5, 9, 2, 40, 33, 7, 7, 12]
MOE = MoEConfig(
    num_experts=8, num_experts_per_tok=2, moe_intermediate_size=32, norm_topk_prob=True, sparse_layers=(True, True)
)


@pytest.fixture(scope="module")
def target_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return fixtures.make_moe_target(tmp_path_factory.mktemp("target"))


@pytest.fixture(scope="module")
def target(target_path: Path) -> ReferenceTarget:
    return ReferenceTarget(target_path)


@pytest.fixture
def drafter_path(tmp_path: Path) -> Path:
    return fixtures.make_moe_drafter(tmp_path / "drafter")


def test_the_target_is_what_transformers_computes_and_is_unevenly_loaded(
    target_path: Path, target: ReferenceTarget
) -> None:
    loaded = load_model(str(target_path))
    tokens = torch.randint(fixtures.CYCLE, (60,), generator=torch.Generator().manual_seed(0)).tolist()
    result = PagedSequences(loaded.model, requests=1, max_len=64).run({0: tokens}, taps=fixtures.TARGET_LAYER_IDS)
    logits, features = target.run(tokens, fixtures.TARGET_LAYER_IDS)
    torch.testing.assert_close(result.logits[0], logits, rtol=0, atol=1e-4)
    torch.testing.assert_close(result.output.taps_NF, features, rtol=0, atol=1e-4)
    for layer in loaded.model.layers[1:]:
        assert isinstance(layer.mlp, SparseMoE)
        load = layer.mlp.expert_load
        assert int(load.sum()) == 2 * len(tokens)
        assert int(load.max()) > 2 * int(load.min()) > 0


def test_proposals_equal_the_dense_reference(drafter_path: Path, target: ReferenceTarget) -> None:
    loaded = load_for(drafter_path, target)
    assert loaded.config.decoder.moe == MOE
    reference = ReferenceDrafter.load(drafter_path, target)
    _, features = target.run(TOKENS, fixtures.TARGET_LAYER_IDS)
    for anchor in (3, 17):
        drafts, rows = ModuleDrafter(loaded).propose(features, anchor)
        want_drafts, want_rows = reference.propose(features, anchor)
        assert drafts == want_drafts
        torch.testing.assert_close(rows, want_rows, rtol=0, atol=1e-4)


def test_dense_and_sparse_draft_layers_mix(tmp_path: Path, target: ReferenceTarget) -> None:
    path = fixtures.make_moe_drafter(tmp_path)
    tensors, raw = load_file(path / "model.safetensors"), json.loads((path / "config.json").read_text())
    dense = {
        name: tensor
        for name, tensor in fixtures.random_drafter_tensors(fixtures.drafter_config(), seed=1).items()
        if name.startswith("layers.0.mlp.")
    }
    kept = {name: tensor for name, tensor in tensors.items() if not name.startswith("layers.0.mlp.")}
    fixtures.write_checkpoint(path, {**raw, "mlp_only_layers": [0]}, kept | dense)
    loaded = load_for(path, target)
    assert loaded.config.decoder.moe == replace(MOE, sparse_layers=(False, True))
    _, features = target.run(TOKENS, fixtures.TARGET_LAYER_IDS)
    want = ReferenceDrafter.load(path, target).propose(features, 3)
    assert ModuleDrafter(loaded).propose(features, 3)[0] == want[0]


@pytest.mark.parametrize("fmt", ["deepspec", "speculators", "specforge"])
def test_every_format_gives_it_back(
    fmt: DrafterFormat, drafter_path: Path, tmp_path: Path, target: ReferenceTarget
) -> None:
    first = load_for(drafter_path, target)
    save_drafter(first.model, first.config, tmp_path / fmt, fmt=fmt)
    second = load_for(tmp_path / fmt, target)
    assert second.config == replace(first.config, source_format=fmt)
    before, after = checkpoint_views(first.model), checkpoint_views(second.model)
    assert all(torch.equal(before[name].tensor, after[name].tensor) for name in before)


def _drop(name: str) -> Callable[[dict[str, Tensor], dict[str, Any]], None]:
    def change(tensors: dict[str, Tensor], _config: dict[str, Any]) -> None:
        del tensors[name]

    return change


def _one_expert_more(tensors: dict[str, Tensor], _config: dict[str, Any]) -> None:
    tensors["layers.0.mlp.experts.8.up_proj.weight"] = torch.zeros(32, fixtures.HIDDEN)


def _shared_expert(tensors: dict[str, Tensor], _config: dict[str, Any]) -> None:
    tensors["layers.0.mlp.shared_expert.up_proj.weight"] = torch.zeros(32, fixtures.HIDDEN)


def _wider(_tensors: dict[str, Tensor], config: dict[str, Any]) -> None:
    config["moe_intermediate_size"] = 16


def _dense_layer(_tensors: dict[str, Tensor], config: dict[str, Any]) -> None:
    config["mlp_only_layers"] = [1]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (_drop("layers.1.mlp.experts.7.down_proj.weight"), r"missing: layers\.1\.mlp\.experts\.7\.down_proj\.weight"),
        (_drop("layers.0.mlp.gate.weight"), r"missing: layers\.0\.mlp\.gate\.weight \(8, 64\)"),
        (_one_expert_more, r"unexpected: layers\.0\.mlp\.experts\.8\.up_proj\.weight"),
        (_shared_expert, r"unexpected: layers\.0\.mlp\.shared_expert"),
        (_wider, r"experts\.0\.gate_proj\.weight has shape \(32, 64\), but the config asks for \(16, 64\)"),
        (_dense_layer, r"missing: layers\.1\.mlp\.gate_proj\.weight.*unexpected: layers\.1\.mlp\.experts\.0"),
    ],
)
def test_every_expert_is_accounted_for(
    change: Callable[[dict[str, Tensor], dict[str, Any]], None],
    message: str,
    drafter_path: Path,
    target: ReferenceTarget,
) -> None:
    tensors, config = (
        load_file(drafter_path / "model.safetensors"),
        json.loads((drafter_path / "config.json").read_text()),
    )
    change(tensors, config)
    save_file(tensors, drafter_path / "model.safetensors")
    (drafter_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match=message):
        load_for(drafter_path, target)
    assert not inspect_path(str(drafter_path)).loadable


def test_mixtral_layers_are_refused_by_name() -> None:
    config = fixtures.drafter_config(model_type="mixtral", num_local_experts=8, num_experts_per_tok=2)
    with pytest.raises(CheckpointError, match=r"model_type='mixtral'.*llama, qwen3, qwen3_moe"):
        read_drafter_config(config)


def test_inspect_prints_the_experts(drafter_path: Path, target_path: Path) -> None:
    drafter = CliRunner().invoke(build_app("inspect"), ["inspect", str(drafter_path)])
    assert drafter.exit_code == 0, drafter.output
    assert all(text in drafter.output for text in ("moe.num_experts", "moe.num_experts_per_tok", "deepspec"))
    model = inspect_path(str(target_path))
    assert model.loadable
    assert sum(".experts." in name for name in model.used) == 3 * 8 * 3
