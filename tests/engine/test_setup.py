"""Resolving a configuration: what is refused before weights load, and how the KV memory bounds the context."""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path
from typing import Any

import pytest
from tests.fixtures import make_cycle_target, make_moe_drafter, make_moe_target, make_perfect_drafter

from outrider.config import EngineArgs
from outrider.engine.devices import available_bytes
from outrider.engine.launch import make_engine
from outrider.engine.setup import build_engine, resolve
from outrider.errors import ConfigError

BYTES_PER_TOKEN = 2 * 4 * 2 * 16 * 4  # keys and values of 4 layers, 2 heads of 16, float32


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(make_cycle_target(tmp_path_factory.mktemp("cycle")))


def test_a_small_pool_lowers_the_default_context_limit(target: str) -> None:
    resolved = resolve(
        EngineArgs(model=target, dtype="float32", draft="none", kv_cache_memory_bytes=100 * BYTES_PER_TOKEN)
    )
    assert resolved.config.num_kv_blocks == 6
    assert resolved.config.max_model_len == 96


def test_a_context_limit_asked_for_is_never_lowered_silently(target: str) -> None:
    with pytest.raises(ConfigError, match=r"max_model_len=97 exceeds the 96 tokens .*kv_cache_memory_bytes"):
        resolve(
            EngineArgs(
                model=target,
                draft="none",
                dtype="float32",
                max_model_len=97,
                kv_cache_memory_bytes=100 * BYTES_PER_TOKEN,
            )
        )


def test_the_drafters_layers_are_paid_from_the_same_budget(target: str, tmp_path: Path) -> None:
    drafter = str(make_perfect_drafter(tmp_path))
    budget = 64 * BYTES_PER_TOKEN * 16
    args = EngineArgs(model=target, dtype="float32", kv_cache_memory_bytes=budget)
    alone = resolve(dataclasses.replace(args, draft="none")).layout
    both = resolve(dataclasses.replace(args, draft=drafter)).layout
    assert alone.num_blocks == 64
    assert both.drafter_bytes_per_token == BYTES_PER_TOKEN // 2
    assert both.num_blocks == 42  # two thirds: the drafter has half the target's layers
    assert f"target {BYTES_PER_TOKEN}, drafter {BYTES_PER_TOKEN // 2}" in both.describe()


@pytest.mark.parametrize(("max_model_len", "kv_block_size"), [(20, 16), (100, 256)])
def test_the_default_memory_holds_whole_blocks_of_both_models(
    target: str, tmp_path: Path, max_model_len: int, kv_block_size: int
) -> None:
    """The least a user may ask for: one request at a time, its length no multiple of a block."""
    drafter = str(make_perfect_drafter(tmp_path))
    config = resolve(
        EngineArgs(
            model=target, draft=drafter, max_model_len=max_model_len, kv_block_size=kv_block_size, max_num_seqs=1
        )
    ).config
    assert config.max_model_len == max_model_len
    assert config.num_kv_blocks * kv_block_size >= max_model_len


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_the_default_memory_is_not_bounded_by_what_files_keep_cached() -> None:
    """MemAvailable counts the page cache, MemFree does not."""
    fields = dict(line.split(":") for line in Path("/proc/meminfo").read_text(encoding="ascii").splitlines())
    available = int(fields["MemAvailable"].split()[0]) * 1024
    assert available_bytes("cpu", num_ranks=1) == pytest.approx(available, rel=0.2)


@pytest.mark.parametrize(
    ("drafted", "changes", "message"),
    [
        (False, {"all2all_backend": "alltoall"}, r"all2all_backend='alltoall' needs enable_expert_parallel"),
        (
            False,
            {"all2all_backend": "naive"},
            r"all2all_backend='naive' must be one of allgather_reducescatter, alltoall",
        ),
        (False, {"enable_expert_parallel": True}, r"num_experts=8 of the target does not divide by the 3 ranks"),
        (False, {}, r"moe_intermediate_size=32 of the target does not divide by the 3 ranks"),
        (True, {"enable_expert_parallel": True}, r"num_experts=8 of the drafter does not divide by the 3 ranks"),
        (True, {}, r"moe_intermediate_size=32 of the drafter does not divide by the 3 ranks"),
    ],
)
def test_experts_that_cannot_be_spread_are_refused_before_weights_load(
    drafted: bool, changes: dict[str, Any], message: str, target: str, tmp_path: Path
) -> None:
    """A MoE target without drafter, or a dense one with a MoE drafter, on three data-parallel ranks."""
    model = target if drafted else str(make_moe_target(tmp_path / "target"))
    draft = str(make_moe_drafter(tmp_path / "drafter")) if drafted else "none"
    with pytest.raises(ConfigError, match=message):
        resolve(EngineArgs(model=model, draft=draft, data_parallel_size=3, **changes))


@pytest.mark.parametrize(
    ("experts", "changes", "message"),
    [
        (
            True,
            {"enable_expert_parallel": True, "all2all_backend": "alltoall"},
            r"all2all_backend='alltoall' .*one rank only",
        ),
        (
            False,
            {"enable_expert_parallel": True, "data_parallel_size": 2},
            r"enable_expert_parallel .*neither the model nor",
        ),
        (False, {"mask_padded_tokens": "on"}, r"mask_padded_tokens='on' .*neither the model nor its drafter"),
        (False, {"mask_padded_tokens": "off"}, r"mask_padded_tokens='off' .*neither the model nor its drafter"),
    ],
)
def test_flags_of_experts_without_a_use_are_refused(
    experts: bool, changes: dict[str, Any], message: str, target: str, tmp_path: Path
) -> None:
    model = str(make_moe_target(tmp_path)) if experts else target
    with pytest.raises(ConfigError, match=message):
        resolve(EngineArgs(model=model, draft="none", **changes))


def test_expert_parallelism_of_one_rank_holds_every_expert(tmp_path: Path) -> None:
    model = str(make_moe_target(tmp_path))
    args = EngineArgs(model=model, draft="none", enable_expert_parallel=True, kv_cache_memory_bytes=1 << 20)
    for engine in (make_engine(args), build_engine(args)):
        assert engine.stats().expert_parallel_size == 1


@pytest.mark.parametrize("name", ["prompt_lookup_max", "prompt_lookup_min"])
@pytest.mark.parametrize("drafted", [False, True])
def test_flags_of_lookup_without_lookup_are_refused(name: str, drafted: bool, target: str, tmp_path: Path) -> None:
    draft = str(make_perfect_drafter(tmp_path)) if drafted else "none"
    with pytest.raises(ConfigError, match=rf"{name}=2 is about prompt lookup; it needs draft='lookup', not "):
        resolve(EngineArgs(model=target, draft=draft, **{name: 2}))  # type: ignore[arg-type]
    config = resolve(EngineArgs(model=target, draft="lookup", **{name: 2})).config  # type: ignore[arg-type]
    assert (config.prompt_lookup_min, config.prompt_lookup_max) == ((1, 2) if name == "prompt_lookup_max" else (2, 3))


def test_comparisons_keep_flags_for_the_engines_that_have_a_use_for_them(target: str, tmp_path: Path) -> None:
    args = EngineArgs(
        model=target,
        draft=str(make_perfect_drafter(tmp_path)),
        num_speculative_tokens=3,
        draft_confidence_threshold=0.1,
        prompt_lookup_max=2,
    )
    own, lookup, none = (resolve(args.drafting_with(draft)).config for draft in (args.draft, "lookup", "none"))
    assert (own.num_speculative_tokens, own.draft_confidence_threshold) == (3, 0.1)
    assert (lookup.prompt_lookup_max, lookup.draft_confidence_threshold) == (2, 0.0)
    assert none.num_speculative_tokens == 0
