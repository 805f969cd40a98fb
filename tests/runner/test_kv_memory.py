"""One budget for the keys and values of target and drafter."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests import fixtures

from outrider.errors import ConfigError
from outrider.models.model_config import from_hf
from outrider.runner.kv_memory import allocate_kv, kv_bytes_per_token, plan_kv_memory

CONFIG = from_hf(fixtures.target_config())


def test_bytes_of_a_token_are_those_of_the_pool_it_lies_in() -> None:
    for dtype, size in (("float32", 4), ("bfloat16", 2)):
        per_token = kv_bytes_per_token(CONFIG, dtype)  # type: ignore[arg-type]
        assert per_token == 2 * 4 * 2 * 16 * size  # keys and values, layers, heads, head size
        layout = plan_kv_memory(
            budget_bytes=1 << 16, kv_block_size=16, target_bytes_per_token=per_token, drafter_bytes_per_token=0
        )
        pools = allocate_kv(CONFIG, layout, dtype=dtype, device=torch.device("cpu"))  # type: ignore[arg-type]
        held = sum(t.numel() * t.element_size() for kv in pools for t in (kv.key_SHD, kv.value_SHD))
        assert held == layout.total_bytes == 1 << 16
        assert not any(t.any() for kv in pools for t in (kv.key_SHD, kv.value_SHD))


@given(st.integers(1, 10**7), st.integers(1, 64), st.integers(1, 4096), st.integers(0, 4096))
def test_the_budget_is_never_exceeded_and_never_wasted(budget: int, size: int, target: int, drafter: int) -> None:
    block = size * (target + drafter)
    arguments = {
        "budget_bytes": budget,
        "kv_block_size": size,
        "target_bytes_per_token": target,
        "drafter_bytes_per_token": drafter,
    }
    if budget < block:
        with pytest.raises(
            ConfigError, match=rf"kv_cache_memory_bytes={budget} .* kv_block_size={size} .* {block} bytes"
        ):
            plan_kv_memory(**arguments)
        return
    layout = plan_kv_memory(**arguments)
    assert layout.total_bytes <= budget < layout.total_bytes + block
    assert f"{layout.num_blocks} blocks of {size} tokens" in layout.describe()
