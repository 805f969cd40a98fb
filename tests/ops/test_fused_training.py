"""Norms, rotated heads and activations of a training pass against the torch layers they replace."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from outrider.layers.rotary import RotaryPhase, apply_rotary
from outrider.ops import fused_training
from outrider.ops.fused_training import fused, normed_rotated_heads, rms_norm, swiglu

_EPS = 1e-5
_NEAR = 6e-3  # relative distance that rounding to bfloat16 once or twice may make (2^-8 at most, each time)


@pytest.fixture(autouse=True, scope="module")
def _compiled() -> None:
    with torch.enable_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
        if not fused():
            pytest.skip("no compiler here: layers train in torch")


def _distance(got: Tensor, wanted: Tensor) -> float:
    return float((got.double() - wanted.double()).norm() / wanted.double().norm().clamp(min=1e-9))


def _with_gradients(run: Callable[..., Tensor], inputs: list[Tensor], outer: Tensor) -> list[Tensor]:
    """The result, then the gradient of every input."""
    leaves = [x.clone().requires_grad_() for x in inputs]
    out = run(*leaves)
    out.backward(outer.to(out.dtype))  # type: ignore[no-untyped-call]
    gradients = [leaf.grad for leaf in leaves]
    assert all(
        gradient is not None and gradient.shape == x.shape for gradient, x in zip(gradients, inputs, strict=True)
    )
    return [out.detach(), *(gradient for gradient in gradients if gradient is not None)]


def _same(one: Callable[..., Tensor], other: Callable[..., Tensor], inputs: list[Tensor], seed: int) -> None:
    outer = torch.randn(other(*inputs).shape, generator=torch.Generator().manual_seed(seed)).bfloat16()
    got, wanted = (_with_gradients(run, inputs, outer) for run in (one, other))
    for number, (a, b) in enumerate(zip(got, wanted, strict=True)):
        assert _distance(a, b) < _NEAR, f"{number}: {_distance(a, b)}"


@given(rows=st.integers(1, 70), size=st.sampled_from([8, 24, 64, 576]), bf16=st.booleans(), seed=st.integers(0, 99))
@settings(max_examples=40, deadline=None)
def test_norm_and_its_gradients(rows: int, size: int, bf16: bool, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    x = (3 * torch.randn(rows, size, generator=generator)).bfloat16().float()
    weight = torch.rand(size, generator=generator) + 0.5
    given_dtype = torch.bfloat16 if bf16 else torch.float32

    def one(x: Tensor, weight: Tensor) -> Tensor:
        return rms_norm(x.to(given_dtype), weight, _EPS)

    _same(one, lambda x, weight: F.rms_norm(x, (size,), weight, _EPS), [x, weight], seed)
    assert one(x, weight).dtype == torch.bfloat16


@given(
    rows=st.integers(1, 40),
    query_heads=st.integers(0, 6),
    kv_heads=st.integers(1, 3),
    size=st.sampled_from([4, 16, 64, 128]),
    seed=st.integers(0, 99),
)
@settings(max_examples=40, deadline=None)
def test_heads_and_their_gradients(rows: int, query_heads: int, kv_heads: int, size: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    qkv = torch.randn(rows, query_heads + 2 * kv_heads, size, generator=generator).bfloat16().float()
    weights = [torch.rand(size, generator=generator) + 0.5 for _ in range(2)]
    angles = 6.3 * torch.rand(rows, size // 2, generator=generator)
    phase = RotaryPhase(angles.cos(), angles.sin())
    keys = query_heads + kv_heads

    def one(qkv: Tensor, query_weight: Tensor, key_weight: Tensor) -> Tensor:
        parts = normed_rotated_heads(
            qkv, query_weight, key_weight, cos=phase.cos_NE, sin=phase.sin_NE, num_kv_heads=kv_heads, eps=_EPS
        )
        assert [part.shape[1] for part in parts] == [query_heads, kv_heads, kv_heads]
        return torch.cat(parts, dim=1)

    def other(qkv: Tensor, query_weight: Tensor, key_weight: Tensor) -> Tensor:
        query = F.rms_norm(qkv[:, :query_heads], (size,), query_weight, _EPS)
        key = F.rms_norm(qkv[:, query_heads:keys], (size,), key_weight, _EPS)
        return torch.cat((apply_rotary(query, phase), apply_rotary(key, phase), qkv[:, keys:]), dim=1)

    _same(one, other, [qkv, *weights], seed)


@given(rows=st.integers(1, 40), size=st.sampled_from([1, 7, 64, 384]), seed=st.integers(0, 99))
@settings(max_examples=30, deadline=None)
def test_swiglu_and_its_gradient(rows: int, size: int, seed: int) -> None:
    both = (3 * torch.randn(rows, 2 * size, generator=torch.Generator().manual_seed(seed))).bfloat16().float()
    _same(swiglu, lambda both: F.silu(both[:, :size]) * both[:, size:], [both], seed)


def test_gradients_have_the_same_bits_every_time() -> None:
    generator = torch.Generator().manual_seed(3)
    x, weight, outer = (torch.randn(*shape, generator=generator) for shape in ((500, 64), (64,), (500, 64)))
    runs = [_with_gradients(lambda x, w: rms_norm(x, w, _EPS), [x, weight], outer) for _ in range(5)]
    for run in runs[1:]:
        assert all(torch.equal(a, b) for a, b in zip(run, runs[0], strict=True))


def test_only_training_in_bfloat16_is_fused(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not fused()  # no autocast
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert fused()
        with torch.no_grad():
            assert not fused()
        with torch.inference_mode():
            assert not fused()
        monkeypatch.setattr(fused_training, "compiled", lambda _source: None)
        assert not fused()
    with torch.autocast("cpu", dtype=torch.float16):
        assert not fused()
