"""On a real CUDA device: start-up records every tier, and replays give the tokens of eager passes and of the CPU."""

from __future__ import annotations

import logging
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from tests import fixtures
from tests.engine.zoo import Zoo, assert_same_but_for_ties, generate, greedy, random_prompt, tokens
from tests.layers.attention.test_static import SIZE, WIDTH, pool, tier
from tests.runner.test_batch_builder import GAMMA, REQUESTS, WIDTHS, builder, draft_rows, find, verify_rows

from outrider import LLM, SamplingParams
from outrider.batch.step_plan import EAGER, PassKind, RankRow, plan_step
from outrider.batch.tiers import capture_sizes
from outrider.layers.attention.reference import ReferenceAttention
from outrider.layers.attention.static import StaticAttention
from outrider.runner.cuda_graph_runner import CudaGraphRunner
from outrider.runner.graph_runner import GraphKey
from outrider.runner.static_inputs import flatten

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]
MAX_LEN = 96


@pytest.fixture(scope="module")
def zoo(tmp_path_factory: pytest.TempPathFactory) -> Zoo:
    return Zoo(tmp_path_factory.mktemp("zoo"))


def moe_models(root: Path) -> tuple[str, str]:
    return str(fixtures.make_moe_target(root / "target")), str(fixtures.make_moe_drafter(root / "drafter"))


def engine(zoo: Zoo, target: str, drafter: str, **args: Any) -> LLM:
    return zoo.llm(target, drafter, max_model_len=MAX_LEN, max_num_seqs=8, **args)


def test_static_attention_on_the_device_is_the_reference_on_the_cpu() -> None:
    widths, lengths = [WIDTH, 1, 3], [20, 33, 3]
    metadata = tier(widths, lengths, 5)
    query = torch.randn(5 * WIDTH, 6, 8, generator=torch.Generator().manual_seed(0))
    kv = pool(2, 8, metadata.block_tables_RB, lengths)
    expected = ReferenceAttention().causal(query, kv, metadata, scale=0.4)
    on_gpu = type(metadata)(
        **{name: x.cuda() for name, x in flatten(metadata)[0].items()},
        kv_block_size=SIZE,
        max_query_len=metadata.max_query_len,
        max_seq_len=metadata.max_seq_len,
    )
    found = StaticAttention().causal(query.cuda(), type(kv)(kv.key_SHD.cuda(), kv.value_SHD.cuda()), on_gpu, scale=0.4)
    torch.testing.assert_close(found.cpu(), expected, rtol=1e-4, atol=1e-5)


def test_s1_a_recorded_pass_reads_this_steps_batch_on_every_rank() -> None:
    """Case S1's counts, rank by rank, through one runner: the tier's graph on each rank's own rows."""
    device = torch.device("cuda", 0)
    rows = [
        RankRow(
            prefill_requests=0,
            prefill_tokens=0,
            prefill_logit_rows=0,
            draft_requests=n,
            verify_requests=n,
            verify_tokens=n * WIDTHS.verify,
            graph_capable=1,
        )
        for n in REQUESTS
    ]
    plan = plan_step(rows, tiers=(1, 2, 4, 8), widths=WIDTHS)
    draft, verify = find(plan, PassKind.DRAFT), find(plan, PassKind.VERIFY)
    assert draft.tier == verify.tier == 4 != EAGER
    runner = CudaGraphRunner((4,), device=device)
    with torch.inference_mode():
        for rank, count in enumerate(REQUESTS):
            drafts = builder(rank).draft(draft, draft_rows(count))
            windows = builder(rank).verify(verify, verify_rows(count))
            key = GraphKey.of(draft, rank)
            if key not in runner.captured_keys:  # the same on every rank
                runner.capture(key, drafts.inputs, lambda given: given.anchor_ids_R * 3 + given.anchor_positions_R)
                runner.capture(GraphKey.of(verify, rank), windows.inputs, lambda given: given.token_ids_N * 5)
            found = runner.run(key, drafts.inputs, lambda given: given.anchor_ids_R)
            assert torch.equal(found.cpu(), drafts.anchor_ids_R * 3 + drafts.anchor_positions_R)
            found = runner.run(GraphKey.of(verify, rank), windows.inputs, lambda given: given.token_ids_N)
            assert torch.equal(found.cpu(), windows.token_ids_N * 5)
            assert found.shape == (4 * (GAMMA + 1),)
    assert runner.num_replays == 2 * len(REQUESTS)


def test_start_up_records_27_tiers_of_both_models(zoo: Zoo, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="outrider"):
        llm = zoo.llm("cycle", "half", max_model_len=MAX_LEN, max_num_seqs=64, device="cuda")
    assert len(capture_sizes(64)) == 27
    assert any("target 27/27, draft 27/27 in" in record.getMessage() for record in caplog.records)
    prompts = [fixtures.orbit_prompt(3 + i % 9) for i in range(70)]
    for prompt, output in zip(prompts, generate(llm, prompts, greedy(12)), strict=True):
        assert tokens(output) == fixtures.continuation(prompt, 12)
    assert llm.stats().graph_replays_total > 0


@pytest.mark.parametrize("drafter", ["none", "perfect", "half"])
def test_tokens_are_those_of_eager_passes_and_of_the_cpu(drafter: str, zoo: Zoo) -> None:
    """Batches of random sizes whose requests end at different rounds; seeded sampling too."""
    cpu = engine(zoo, "cycle", drafter)
    eager = engine(zoo, "cycle", drafter, device="cuda", enforce_eager=True)
    replayed = engine(zoo, "cycle", drafter, device="cuda")
    draw = random.Random(5)
    for count in (1, 8, draw.randint(2, 7), draw.randint(9, 12)):
        prompts = [fixtures.orbit_prompt(draw.randint(1, 40), first_generated_index=7 * i) for i in range(count)]
        params = [
            greedy(draw.randint(1, 24), ignore_eos=True)
            if i % 3
            else SamplingParams(temperature=0.7, seed=i, max_tokens=draw.randint(1, 24), ignore_eos=True)
            for i in range(count)
        ]
        expected, *found = (
            [(tokens(o), o.spec) for o in generate(llm, prompts, params)] for llm in (cpu, eager, replayed)
        )
        assert found == [expected, expected], f"{drafter}, {count} requests"
    assert replayed.stats().graph_replays_total > eager.stats().graph_replays_total == 0


@pytest.mark.parametrize("kind", ["dense", "moe"])
def test_random_models_part_from_the_cpu_at_ties_only(kind: str, zoo: Zoo, tmp_path: Path) -> None:
    """With experts in target and drafter: recorded passes compute them in the static way."""
    target, drafter = moe_models(tmp_path) if kind == "moe" else ("rand", "random")
    cpu = engine(zoo, target, drafter)
    replayed = engine(zoo, target, drafter, device="cuda")
    prompts = [random_prompt(n, seed=n) for n in (1, 15, 16, 17, 33, 40)]
    params = greedy(16, ignore_eos=True, logprobs=2)
    both = zip(generate(cpu, prompts, params), generate(replayed, prompts, params), strict=True)
    for i, (reference, output) in enumerate(both):
        assert_same_but_for_ties(reference, output, f"{kind}, request {i}")
    assert replayed.stats().graph_replays_total > 0
