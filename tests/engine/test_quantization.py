"""Quantised engines: the text of greedy decoding does not depend on drafting or company, bit for bit; refusals."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tests import fixtures
from tests.engine.zoo import Zoo, generate, greedy, random_prompt, tokens
from tests.kernels import needs_kernels

from outrider.config import EngineArgs, QuantizationName
from outrider.engine import quantization
from outrider.engine.launch import _pinned
from outrider.engine.setup import resolve
from outrider.errors import ConfigError
from outrider.ops.native_kernels import load_kernels

MODES: tuple[QuantizationName, ...] = ("int8", "int4")
PROMPTS = [random_prompt(length, seed=length) for length in (3, 29, 17, 40, 2)]
PARAMS = greedy(40, ignore_eos=True)


def texts(zoo: Zoo, drafter: str, *, together: bool, **args: Any) -> list[list[int]]:
    llm = zoo.llm("rand", drafter, **args)
    batches = [PROMPTS] if together else [[prompt] for prompt in PROMPTS]
    return [tokens(output) for batch in batches for output in generate(llm, batch, PARAMS)]


@needs_kernels
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_greedy_text_is_the_same_with_and_without_drafting(zoo: Zoo, mode: QuantizationName, dtype: str) -> None:
    args = {"quantization": mode, "dtype": dtype}
    plain = texts(zoo, "none", together=False, **args)
    assert texts(zoo, "none", together=True, **args) == plain
    for drafter in ("random", "lookup"):
        assert texts(zoo, drafter, together=True, **args) == plain, drafter
    chunked = {**args, "max_num_batched_tokens": 16, "max_num_seqs": 3}
    assert texts(zoo, "random", together=True, **chunked) == plain


@needs_kernels
def test_quantised_text_is_close_to_the_model_s(zoo: Zoo) -> None:
    """Random weights: the same first tokens, not the same text for ever."""
    exact = texts(zoo, "none", together=True)
    for mode, least in (("int8", 3), ("int4", 1)):
        found = texts(zoo, "none", together=True, quantization=mode)
        assert sum(a[0] == b[0] for a, b in zip(exact, found, strict=True)) >= least, mode


@needs_kernels
def test_logprobs_are_those_of_the_quantised_model(zoo: Zoo) -> None:
    params = greedy(4, logprobs=1, ignore_eos=True)
    outputs = [generate(zoo.llm("rand", quantization=mode), PROMPTS[:1], params)[0] for mode in ("none", "int8")]
    first, second = (torch.tensor([step.top[0].logprob for step in out.outputs[0].logprobs or []]) for out in outputs)
    assert not torch.equal(first, second)
    torch.testing.assert_close(first[:1], second[:1], rtol=0, atol=0.2)


@needs_kernels
def test_the_kernels_threads_are_the_only_ones(zoo: Zoo) -> None:
    """Threads of torch that spin on the same cores cost milliseconds a step."""
    before = torch.get_num_threads()
    kernels = load_kernels()
    assert kernels is not None
    threads = kernels.threads
    try:
        zoo.llm("rand", quantization="int8")
        assert torch.get_num_threads() == 1
        assert kernels.threads == threads
    finally:
        torch.set_num_threads(before)


def resolved(path: Path | str, **args: Any) -> str:
    return resolve(EngineArgs(model=str(path), draft="none", **args)).config.quantization


@pytest.fixture
def said(log: pytest.LogCaptureFixture) -> Callable[[], list[str]]:
    """What the log said of the back end since the last time it was asked."""
    quantization._say_once.cache_clear()

    def lines() -> list[str]:
        found = [line for line in log.messages if "runs in torch" in line]
        log.clear()
        return found

    return lines


@needs_kernels
def test_the_default_is_int8_for_weights_that_are_not_4_bit(zoo: Zoo, said: Callable[[], list[str]]) -> None:
    assert resolved(zoo.path("rand")) == resolved(zoo.path("rand"), quantization="auto") == "int8"
    assert resolved(zoo.path("rand"), quantization="int4") == "int4"
    assert resolved(zoo.path("rand"), quantization="none") == "none"
    assert said() == []


@needs_kernels
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_type_alone_asks_for_weights_of_that_type(zoo: Zoo, dtype: str, said: Callable[[], list[str]]) -> None:
    config = resolve(EngineArgs(model=str(zoo.path("rand")), draft="none", dtype=dtype)).config  # type: ignore[arg-type]
    assert (config.quantization, config.dtype, config.kv_dtype) == ("none", dtype, dtype)
    both = resolve(EngineArgs(model=str(zoo.path("rand")), draft="none", dtype=dtype, quantization="int4")).config  # type: ignore[arg-type]
    assert (both.quantization, both.dtype, both.kv_dtype) == ("int4", dtype, dtype)
    assert said() == [], "that is what was asked for"


def test_the_default_is_none_where_kernels_do_not_cover_and_one_line_says_why(
    zoo: Zoo, tmp_path: Path, said: Callable[[], list[str]]
) -> None:
    moe = fixtures.make_moe_target(tmp_path / "moe")
    cases: dict[str, tuple[Path, dict[str, Any]]] = {
        "the model has 8 experts": (moe, {}),
        "tensor_parallel_size=1, not 2": (zoo.path("rand"), {"tensor_parallel_size": 2}),
        "attention_backend='auto', not 'reference'": (zoo.path("rand"), {"attention_backend": "reference"}),
    }
    for words, (path, args) in cases.items():
        assert [resolved(path, **args) for _ in range(2)] == ["none", "none"]
        (line,) = said()
        assert line.startswith("the model runs in torch, unquantised: ")
        assert words in line
        with pytest.raises(ConfigError, match=words):
            resolved(path, quantization="int8", **args)
    assert said() == []


def test_without_a_compiler_it_is_refused_and_the_default_is_none(
    zoo: Zoo, monkeypatch: pytest.MonkeyPatch, said: Callable[[], list[str]]
) -> None:
    """What the log says of it is said where the build is: tests/ops/test_native_build.py."""
    monkeypatch.setattr(quantization, "load_kernels", lambda: None)
    assert resolved(zoo.path("rand")) == "none"
    assert said() == []
    config = resolve(EngineArgs(model=str(zoo.path("rand")), draft="none")).config
    assert config.kv_dtype == "float32"
    with pytest.raises(ConfigError, match=r"quantization='int8' needs a C\+\+ compiler"):
        resolved(zoo.path("rand"), quantization="int8")


def test_what_the_front_decides_holds_for_every_rank(zoo: Zoo, monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank on another machine may have a compiler where the front has none, and the other way round."""
    args = EngineArgs(model=str(zoo.path("rand")), draft="none", data_parallel_size=2)
    with monkeypatch.context() as patch:
        patch.setattr(quantization, "load_kernels", lambda: None)
        pinned = _pinned(args, resolve(args))
    assert pinned.quantization == "none"
    assert resolve(pinned).config.quantization == "none"


@needs_kernels
def test_engines_of_one_target_share_its_weights(zoo: Zoo) -> None:
    """Torch modules are loaded once for all of them; packed weights each maps."""
    for mode, loaded in (("none", True), ("int8", False)):
        config = resolve(EngineArgs(model=str(zoo.path("rand")), draft="none", quantization=mode)).config  # type: ignore[arg-type]
        assert (quantization.load_shared_target(config) is not None) is loaded


def test_an_unknown_quantization_is_a_config_error() -> None:
    with pytest.raises(ConfigError, match="quantization='int2' must be one of auto, none, int8, int4"):
        EngineArgs(quantization="int2")  # type: ignore[arg-type]


@needs_kernels
@pytest.mark.parametrize(
    ("dtype", "mode", "expected"),
    [
        ("auto", "none", "float32"),
        ("auto", "auto", "bfloat16"),
        ("auto", "int8", "bfloat16"),
        ("float32", "int8", "float32"),
        ("float32", "auto", "float32"),
    ],
)
def test_compiled_passes_keep_keys_and_values_in_bfloat16_unless_told_otherwise(
    zoo: Zoo, dtype: str, mode: str, expected: str
) -> None:
    args = {"dtype": dtype, "quantization": mode}
    resolved = resolve(EngineArgs(model=str(zoo.path("rand")), draft=str(zoo.path("random")), **args))  # type: ignore[arg-type]
    assert {resolved.config.kv_dtype, resolved.config.drafter_kv_dtype} == {expected}
    shape, size = resolved.model.config, 2 if expected == "bfloat16" else 4
    assert resolved.layout.target_bytes_per_token == 2 * size * shape.num_layers * shape.num_kv_heads * shape.head_dim
