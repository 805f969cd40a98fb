"""An engine over the runner of CUDA graphs and static attention gives the tokens of an eager one.

On the CPU, with graphs that run their forward again. ``--device`` and what it refuses by name.
"""

from __future__ import annotations

import random

import pytest
import torch
from tests import fixtures
from tests.engine.zoo import Zoo, generate, greedy, random_prompt, tokens
from tests.runner.eager_graph import EagerGraph

from outrider import LLM, SamplingParams
from outrider.batch.tiers import capture_sizes
from outrider.config import EngineArgs, EngineConfig
from outrider.engine import setup
from outrider.engine.setup import resolve
from outrider.errors import ConfigError
from outrider.runner.cuda_graph_runner import CudaGraphRunner

MAX_NUM_SEQS = 4


def graphed(config: EngineConfig, device: torch.device) -> CudaGraphRunner:
    return CudaGraphRunner(capture_sizes(config.max_num_seqs), device=device, new_graph=EagerGraph)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[str, str]]:
    """Target and drafter."""
    root = tmp_path_factory.mktemp("models")
    zoo = Zoo(root)
    return {
        "dense": (str(zoo.path("cycle")), str(zoo.path("half"))),
        "moe": (
            str(fixtures.make_moe_target(root / "moe target")),
            str(fixtures.make_moe_drafter(root / "moe drafter")),
        ),
    }


@pytest.mark.parametrize("kind", ["dense", "moe"])
def test_replays_change_no_token(
    kind: str, models: dict[str, tuple[str, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Random numbers of requests that end at different rounds, greedy and sampled, prompts over several chunks."""
    model, draft = models[kind]

    def engine(**args: object) -> LLM:
        return LLM(
            model,
            draft=draft,
            max_model_len=96,
            max_num_seqs=MAX_NUM_SEQS,
            max_num_batched_tokens=64,
            kv_cache_memory_bytes=1 << 22,
            quantization="none",
            **args,
        )

    eager = engine()
    monkeypatch.setattr(setup, "_new_graph_runner", graphed)
    replayed = engine(attention_backend="static", enforce_eager=False)
    draw, longest = random.Random(4), 16 if kind == "dense" else 5  # an expert's products are small and many
    for count in (1, *(draw.randint(2, MAX_NUM_SEQS + 2) for _ in range(2))):
        prompts = [random_prompt(draw.randint(1, 60), seed=i) for i in range(count)]
        params = [
            greedy(draw.randint(1, longest), ignore_eos=True)
            if draw.random() < 0.5
            else SamplingParams(temperature=1.0, seed=i, max_tokens=draw.randint(1, longest), ignore_eos=True)
            for i in range(count)
        ]
        expected, found = ([(tokens(o), o.spec) for o in generate(llm, prompts, params)] for llm in (eager, replayed))
        assert found == expected, f"{kind}, {count} requests"
    assert eager.stats().graph_replays_total == 0
    assert replayed.stats().graph_replays_total > 10


def test_devices_are_resolved_and_refused_by_name(zoo: Zoo, monkeypatch: pytest.MonkeyPatch) -> None:
    model = str(zoo.path("cycle"))

    def resolved(**args: object) -> EngineConfig:
        return resolve(EngineArgs(model=model, draft="none", **args)).config  # type: ignore[arg-type]

    assert resolved().device == "cpu"
    with pytest.raises(ConfigError, match=r"device='tpu' must be one of auto, cpu, cuda"):
        resolved(device="tpu")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert resolved(device="auto").device == "cpu"
    with pytest.raises(ConfigError, match=r"device='cuda' is absent"):
        resolved(device="cuda")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (1 << 30, 1 << 31))
    for device in ("auto", "cuda"):
        config = resolved(device=device)
        assert (config.device, config.enforce_eager) == ("cuda", False), "accelerators capture"
    with pytest.raises(ConfigError, match=r"2 ranks run on this machine.* it has 1"):
        resolved(device="cuda", data_parallel_size=2)
    with pytest.raises(ConfigError, match=r"attention_backend='reference'.*enforce_eager"):
        resolved(device="cuda", attention_backend="reference")
    assert resolved(device="cuda", attention_backend="reference", enforce_eager=True).device == "cuda"
    with pytest.raises(ConfigError, match=r"quantization='int8'.*device='cpu', not 'cuda'"):
        resolved(device="cuda", quantization="int8")
    assert resolved(device="cuda", quantization="auto").quantization == "none"


def test_the_kv_budget_is_the_devices_own_memory(zoo: Zoo, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (1 << 20, 1 << 31))
    args = EngineArgs(model=str(zoo.path("cycle")), draft="none", device="cuda")
    assert resolve(args).layout.total_bytes <= 1 << 19
