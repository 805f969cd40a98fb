"""An engine with tiers gives the tokens of one without, captures what it says, and refuses to guess."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
from tests import fixtures
from tests.engine.zoo import (
    Zoo,
    assert_same_but_for_ties,
    generate,
    greedy,
    on_every_back_end,
    random_prompt,
    tokens,
)

from outrider import SamplingParams
from outrider.batch.step_plan import EAGER, PassKind, StepPlan
from outrider.config import EngineArgs
from outrider.engine.setup import build_engine, resolve
from outrider.parallel.simulated import run_simulated
from outrider.parallel.state import ParallelState
from outrider.parallel.topology import Topology

LENGTHS = (1, 15, 16, 17, 33, 40, 5, 23)


@on_every_back_end
@pytest.mark.parametrize(("target", "drafter"), [("cycle", "half"), ("cycle", "none"), ("rand", "random")])
def test_tiers_change_no_token(target: str, drafter: str, zoo: Zoo) -> None:
    """Batches of 1, 3 and 8, greedy, with requests that end at different rounds; seeded sampling of the 8."""
    eager = zoo.llm(target, drafter, max_model_len=256)
    tiered = zoo.llm(target, drafter, max_model_len=256, enforce_eager=False, max_num_seqs=8)
    prompts = [
        fixtures.orbit_prompt(n, first_generated_index=7 * i) if target == "cycle" else random_prompt(n, seed=i)
        for i, n in enumerate(LENGTHS)
    ]
    for count in (1, 3, 8):
        params = [greedy(24 + 3 * i, ignore_eos=True, logprobs=2) for i in range(count)]
        expected, found = (generate(llm, prompts[:count], params) for llm in (eager, tiered))
        for i, (reference, output) in enumerate(zip(expected, found, strict=True)):
            what = f"{target}, {drafter}, request {i} of {count}"
            if target == "cycle":
                assert tokens(output) == tokens(reference), what
                assert output.spec == reference.spec, what
            else:
                assert_same_but_for_ties(reference, output, what, tie=zoo.tie)
    sampling = [SamplingParams(temperature=1.0, seed=i, max_tokens=20, ignore_eos=True) for i in range(8)]
    outputs = [[tokens(output) for output in generate(llm, prompts, sampling)] for llm in (eager, tiered)]
    assert outputs[0] == outputs[1]


@on_every_back_end
def test_more_requests_than_seats_use_the_last_tier_and_those_below(zoo: Zoo) -> None:
    """Five seats: tiers 1..5; eleven requests leave one by one."""
    llm = zoo.llm("cycle", "perfect", max_model_len=128, enforce_eager=False, max_num_seqs=5)
    prompts = [fixtures.orbit_prompt(3 + i) for i in range(11)]
    outputs = generate(llm, prompts, [greedy(9 + 4 * i) for i in range(11)])
    for i, (prompt, output) in enumerate(zip(prompts, outputs, strict=True)):
        assert tokens(output) == fixtures.continuation(prompt, 9 + 4 * i)


@on_every_back_end
def test_a_confidence_cut_verifies_fewer_rows_within_the_tier(zoo: Zoo) -> None:
    """A cut at half the drafts or so: the tier's padding takes the rows that are left out."""
    params = greedy(30, ignore_eos=True)
    prompts = [random_prompt(n, seed=n) for n in (4, 9, 20)]
    llms = [
        zoo.llm(
            "rand", "random", max_model_len=128, max_num_seqs=4, draft_confidence_threshold=0.5, enforce_eager=eager
        )
        for eager in (True, False)
    ]
    expected, found = ([(tokens(o), o.spec) for o in generate(llm, prompts, params)] for llm in llms)
    assert expected == found
    assert 0 < sum(spec.offered for _, spec in found) < sum(7 * spec.rounds for _, spec in found)


def test_start_up_says_what_was_captured(zoo: Zoo, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="outrider"):
        zoo.llm("cycle", "perfect", max_model_len=64, enforce_eager=False, max_num_seqs=64)
        zoo.llm("cycle", max_model_len=64, enforce_eager=False, max_num_seqs=9)
        zoo.llm("cycle", max_model_len=64)
    lines = [record.getMessage() for record in caplog.records if "tiers captured" in record.getMessage()]
    assert len(lines) == 2, "an eager engine captures nothing"
    assert "target 27/27, draft 27/27 in" in lines[0]
    assert "target 9/9 in" in lines[1]
    assert "static buffers" in lines[1]


def test_defaults_resolve_to_what_the_device_and_the_ranks_ask_for(tmp_path: Path) -> None:
    model = str(fixtures.make_moe_target(tmp_path))
    config = resolve(EngineArgs(model=model, draft="none")).config
    assert (config.enforce_eager, config.mask_padded_tokens) == (True, False)
    config = resolve(EngineArgs(model=model, draft="none", enforce_eager=False, mask_padded_tokens="on")).config
    assert (config.enforce_eager, config.mask_padded_tokens) == (False, True)
    for parallel, masked in ((False, False), (True, True)):
        args = EngineArgs(model=model, draft="none", data_parallel_size=2, enable_expert_parallel=parallel)
        assert resolve(args).config.mask_padded_tokens is masked
    args = EngineArgs(
        model=model, data_parallel_size=2, enable_expert_parallel=True, mask_padded_tokens="off", draft="none"
    )
    assert resolve(args).config.mask_padded_tokens is False


@pytest.mark.parametrize("incapable", [(), (1,)], ids=["all capable", "rank 1 eager"])
def test_the_vote_of_one_rank_makes_every_rank_eager(incapable: tuple[int, ...], zoo: Zoo) -> None:
    """Dense models, so that ranks may start up unlike; one captured nothing, and no rank replays on its own."""

    def on_rank(parallel: ParallelState) -> list[StepPlan]:
        args = EngineArgs(
            model=str(zoo.path("cycle")),
            draft=str(zoo.path("perfect")),
            max_model_len=64,
            max_num_seqs=3,
            kv_cache_memory_bytes=1 << 20,
            data_parallel_size=2,
            enforce_eager=parallel.rank in incapable,
            quantization=zoo.quantization,
        )
        core = build_engine(args, parallel=parallel)
        prompt = fixtures.orbit_prompt(5)
        core.add_request(request_id="r", prompt=None, prompt_token_ids=prompt, params=greedy(20, ignore_eos=True))
        plans: list[StepPlan] = []
        while not plans or not core.agreement.all_idle:
            core.step()
            assert core.plan is not None
            plans.append(core.plan)
        return plans

    topology = Topology(data_parallel_size=2, tensor_parallel_size=1, enable_expert_parallel=False)
    plans = run_simulated(topology, on_rank)
    assert plans[0] == plans[1]
    tiers = {pass_plan.kind: pass_plan.tier for plan in plans[0] for pass_plan in plan.passes}
    decode = EAGER if incapable else 1
    assert tiers == {PassKind.PREFILL: EAGER, PassKind.DRAFT: decode, PassKind.VERIFY: decode}
