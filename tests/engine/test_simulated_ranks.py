"""Four data-parallel ranks with experts on each: every rank issues the same collectives, whatever load it has.

Whole engines run on simulated ranks, which fail the moment two ranks differ, so an idle rank that left out a pass
would end the test and not hang it. Tokens are those of one rank alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
from tests import fixtures
from tests.engine.zoo import Zoo, assert_same_but_for_ties, generate, greedy, random_prompt

from outrider import LLM, SamplingParams
from outrider.batch.step_plan import EAGER, PassKind, StepFamily, StepPlan
from outrider.config import EngineArgs
from outrider.engine.engine_core import EngineCore
from outrider.engine.setup import build_engine, topology_of
from outrider.errors import CollectiveError
from outrider.models.decoder import Decoder
from outrider.models.dspark import DSparkDrafter
from outrider.outputs import RequestOutput
from outrider.parallel.simulated import Simulation
from outrider.parallel.state import ParallelState

NUM_RANKS = 4
VECTORS = ((1, 3, 0, 2), (0, 0, 0, 1), (9, 0, 7, 0), (3, 3, 3, 3), (8, 9, 1, 2))
ARRIVAL_STEPS = 3  # rank r's requests come at step r % 3: some ranks prefill while others decode
SEATS = 9


def load_of(vector: Sequence[int], rank: int) -> list[tuple[list[int], SamplingParams]]:
    """Prompts and lengths of a rank's requests: requests end at different rounds."""
    prompts = [random_prompt(3 + (5 * i + 7 * rank) % 30, seed=10 * rank + i) for i in range(vector[rank])]
    return [(prompt, greedy(5 + (3 * i + rank) % 9, ignore_eos=True, logprobs=2)) for i, prompt in enumerate(prompts)]


def run_vector(core: EngineCore, vector: Sequence[int], rank: int, plans: list[StepPlan]) -> list[RequestOutput]:
    """This rank's requests, stepping as long as any rank has some; every step's plan is added to ``plans``."""
    load = load_of(vector, rank)
    finished: dict[str, RequestOutput] = {}
    step = 0
    while step <= ARRIVAL_STEPS or not core.agreement.all_idle:
        if step == rank % ARRIVAL_STEPS:
            for i, (prompt, params) in enumerate(load):
                core.add_request(request_id=f"{i}", prompt=None, prompt_token_ids=prompt, params=params)
        finished |= {output.request_id: output for output in core.step() if output.finished}
        assert core.plan is not None
        plans.append(core.plan)
        step += 1
    return [finished[f"{i}"] for i in range(len(load))]


class Ranks:
    """Engines of ``num_ranks`` data-parallel ranks, with expert parallelism unless told, run on simulated ranks."""

    def __init__(
        self,
        model: str,
        draft: str,
        *,
        num_ranks: int,
        enforce_eager: bool,
        expert_parallel: bool = True,
        drafted_for: int | None = None,
    ) -> None:
        self.args = EngineArgs(
            model=model,
            draft=draft,
            max_model_len=64,
            max_num_seqs=SEATS,
            max_num_batched_tokens=128,
            kv_cache_memory_bytes=1 << 21,
            data_parallel_size=num_ranks,
            enable_expert_parallel=expert_parallel,
            enforce_eager=enforce_eager,
            quantization="none",
            speculative_disable_by_batch_size=drafted_for,
        )
        self.simulation = Simulation(topology_of(self.args))
        self.plans: list[list[StepPlan]] = [[] for _ in range(num_ranks)]  # of every step, by rank

    def run(self, vectors: Sequence[Sequence[int]]) -> list[list[list[RequestOutput]]]:
        """Outputs by rank, vector and request."""

        def on_rank(parallel: ParallelState) -> list[list[RequestOutput]]:
            core = build_engine(self.args, parallel=parallel)
            rank = parallel.rank
            return [run_vector(core, vector, rank, self.plans[rank]) for vector in vectors]

        return self.simulation.run(on_rank)


@pytest.mark.parametrize(
    ("drafter", "enforce_eager", "vectors"),
    [("moe", False, VECTORS), ("moe", True, VECTORS), ("random", False, VECTORS[:2]), ("none", True, VECTORS[:2])],
)
def test_all_ranks_issue_the_same_collectives(
    drafter: str, enforce_eager: bool, vectors: Sequence[Sequence[int]], zoo: Zoo, tmp_path: Path
) -> None:
    model = str(fixtures.make_moe_target(tmp_path / "target"))
    draft = drafter_path(drafter, zoo, tmp_path)
    ranks = Ranks(model, draft, num_ranks=NUM_RANKS, enforce_eager=enforce_eager)
    results = ranks.run(vectors)
    issued = [[str(call) for call in calls] for calls in ranks.simulation.calls]
    assert len(issued[0]) > 100
    assert all(calls == issued[0] for calls in issued)
    assert {call.group for call in ranks.simulation.calls[0]} == {"attn_dp"}
    assert all(plans == ranks.plans[0] for plans in ranks.plans)
    mixed = [plan for plan in ranks.plans[0] if plan.family is StepFamily.MIXED]
    assert mixed, "no rank decoded while another prefilled"
    for plan in mixed:  # decode passes stay in their tiers
        assert all((p.tier == EAGER) == (enforce_eager or p.kind is PassKind.PREFILL) for p in plan.passes)

    assert_as_alone(zoo.llm(model, draft, max_model_len=64), vectors, results)


def test_ranks_that_draft_beside_ranks_with_too_many_requests_for_it(zoo: Zoo, tmp_path: Path) -> None:
    """The crowded ones have decodes and no drafts, and run the drafter's pass all the same: it has experts."""
    model, draft = str(fixtures.make_moe_target(tmp_path / "target")), drafter_path("moe", zoo, tmp_path)
    ranks = Ranks(model, draft, num_ranks=NUM_RANKS, enforce_eager=False, drafted_for=2)
    results = ranks.run(VECTORS)
    issued = [[str(call) for call in calls] for calls in ranks.simulation.calls]
    assert all(calls == issued[0] for calls in issued)
    beside = 0
    for plan in ranks.plans[0]:
        drafts, verifies = plan.find(PassKind.DRAFT), plan.find(PassKind.VERIFY)
        if drafts is not None and verifies is not None:
            requests = zip(drafts.requests, verifies.requests, strict=True)
            beside += any(drafted.value == 0 < verified.value for drafted, verified in requests)
    assert beside > 10, "no rank was crowded while another drafted"
    assert_as_alone(zoo.llm(model, draft, max_model_len=64), VECTORS, results)


def assert_as_alone(
    alone: LLM, vectors: Sequence[Sequence[int]], results: Sequence[Sequence[Sequence[RequestOutput]]]
) -> None:
    for index, vector in enumerate(vectors):
        for rank in range(NUM_RANKS):
            load = load_of(vector, rank)
            expected = generate(alone, [prompt for prompt, _ in load], [params for _, params in load])
            for i, (reference, output) in enumerate(zip(expected, results[rank][index], strict=True)):
                assert_same_but_for_ties(reference, output, f"{vector}, rank {rank}, request {i}")


@pytest.mark.parametrize("model_class", [Decoder, DSparkDrafter])
def test_an_idle_rank_that_left_out_a_pass_would_be_found(
    model_class: type, zoo: Zoo, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The fault itself: the pass of a model with experts skipped where a rank has no rows."""
    monkeypatch.setattr(model_class, "crosses_dp_ranks", False)
    model = str(fixtures.make_moe_target(tmp_path / "target"))
    ranks = Ranks(model, drafter_path("moe", zoo, tmp_path), num_ranks=2, enforce_eager=True)
    with pytest.raises(CollectiveError, match=r"do not agree|no rank can go on"):
        ranks.run([(1, 0)])


def test_dense_models_cross_ranks_in_the_agreement_alone(zoo: Zoo) -> None:
    """An idle rank of dense models has nothing to do and nobody waits for it."""
    ranks = Ranks(
        str(zoo.path("rand")), str(zoo.path("random")), num_ranks=2, enforce_eager=False, expert_parallel=False
    )
    ranks.run([(2, 0)])
    assert {call.name for calls in ranks.simulation.calls for call in calls} == {"all_gather_row"}


def drafter_path(name: str, zoo: Zoo, tmp_path: Path) -> str:
    if name == "moe":
        return str(fixtures.make_moe_drafter(tmp_path / "drafter"))
    return str(zoo.path(name)) if name == "random" else name
