"""What must hold in a cell, given what every rank saw of it and what one rank alone gives for each request.

The reference of a greedy request is one rank without drafting. That of a seeded one is one rank with the same drafter:
a draft draws random numbers of its own, so drafting gives another sample of the same distribution. Rounds and accepted
drafts must be those of one rank with the same drafter for both.

Ranks add fp32 sums in another order than one rank does, which may flip a numerical tie: a greedy request may part from
its reference where the reference's two best tokens are closer than ``zoo.TIE``. Each such place is returned, to be
listed and counted; nothing else may differ.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

from tests import fixtures
from tests.engine.zoo import TIE, run_to_end
from tests.matrix.cells import Job, Models, Ran, Seen, engine_args
from tests.matrix.loads import Arrival, Load

from outrider import SamplingParams
from outrider.batch.step_plan import EAGER, PassKind, StepPlan
from outrider.engine.engine_core import EngineCore
from outrider.engine.setup import build_engine
from outrider.outputs import PositionLogprobs
from outrider.parallel.topology import Topology

SPARSE_LAYERS = {"target": fixtures.LAYERS - 1, "drafter": fixtures.DRAFT_LAYERS}  # of the MOE models


@dataclass(frozen=True, slots=True, kw_only=True)
class Alone:
    """One request on one rank."""

    ran: Ran
    logprobs: tuple[PositionLogprobs, ...]  # the two best of every position


class References:
    """Each request on one rank, run once for every target and drafter."""

    def __init__(self, models: Models) -> None:
        self._models = models
        self._cores: dict[tuple[str, str, float], EngineCore] = {}
        self._alone: dict[tuple[str, str, float, tuple[int, ...], SamplingParams], Alone] = {}

    def get(self, target: str, drafter: str, arrival: Arrival, *, threshold: float = 0.0) -> Alone:
        key = (target, drafter, threshold, arrival.prompt, arrival.params)
        if key not in self._alone:
            self._alone[key] = self._run(self._core(target, drafter, threshold), arrival)
        return self._alone[key]

    def _run(self, core: EngineCore, arrival: Arrival) -> Alone:
        params = dataclasses.replace(arrival.params, logprobs=2)
        core.add_request(request_id="alone", prompt=None, prompt_token_ids=arrival.prompt, params=params)
        output = run_to_end(core)["alone"]
        logprobs = output.outputs[0].logprobs
        assert logprobs is not None
        return Alone(ran=Ran(token_ids=output.outputs[0].token_ids, spec=output.spec), logprobs=logprobs)

    def _core(self, target: str, drafter: str, threshold: float) -> EngineCore:
        key = (target, drafter, threshold)
        if key not in self._cores:
            job = Job(
                target=target, drafter=drafter, experts="slices", tiers=False, loads=(), confidence_threshold=threshold
            )
            self._cores[key] = build_engine(engine_args(job, self._models, dp=1, tp=1))
        return self._cores[key]


def check_cell(shape: Topology, job: Job, load: Load, seen: Sequence[Seen], references: References) -> list[str]:
    """``seen`` by rank of the world. Places where a tie fell otherwise; raises AssertionError for all else."""
    _check_lock_step(shape, seen)
    _check_what_ran(job, load, seen)
    _check_experts(shape, job, seen)
    ties = []
    for rank, of_rank in enumerate(seen):
        own = [arrival for arrival in load.arrivals if arrival.dp_rank == of_rank.dp_rank]
        assert of_rank.requests.keys() == {arrival.request_id for arrival in own}, f"rank {rank} has other requests"
        assert of_rank.blocks_held == 0, f"rank {rank} still holds {of_rank.blocks_held} blocks"
        for arrival in own:
            tie = _check_request(job, arrival, of_rank.requests[arrival.request_id], references)
            if tie and shape.is_leader(rank):
                ties.append(tie)
    for rank, of_rank in enumerate(seen):
        leader = shape.attn_tp_ranks(rank)[0]
        assert of_rank.requests == seen[leader].requests, f"ranks {leader} and {rank} share requests and differ"
    return ties


def _check_lock_step(shape: Topology, seen: Sequence[Seen]) -> None:
    """The same steps, plans and collectives on all ranks."""
    assert len({of_rank.num_steps for of_rank in seen}) == 1, [of_rank.num_steps for of_rank in seen]
    assert seen[0].num_steps == len(seen[0].plans)
    digests = [[plan.digest() for plan in of_rank.plans] for of_rank in seen]
    assert all(own == digests[0] for own in digests), "ranks made different plans"
    for rank, of_rank in enumerate(seen):
        leader = shape.attn_tp_ranks(rank)[0]
        assert of_rank.calls == seen[leader].calls, f"ranks {leader} and {rank} issued different collectives"
        across = [[call for call in one.calls if not call.startswith("attn_tp.")] for one in (of_rank, seen[0])]
        assert across[0] == across[1], f"ranks 0 and {rank} issued different collectives"
    if shape.world_size > 1:
        gathers = sum(call == "attn_dp.all_gather_row" for call in seen[0].calls)
        assert gathers == (seen[0].num_steps if shape.data_parallel_size > 1 else 0)


def _check_what_ran(job: Job, load: Load, seen: Sequence[Seen]) -> None:
    """The load was what its name says, and tiers were replayed where there are any."""
    plans = seen[0].plans
    ranks = range(len(plans[0].passes[0].requests))
    match load.name:
        case "busy":
            assert any(all(_rows(plan, PassKind.VERIFY, rank) for rank in ranks) for plan in plans)
        case "one-idle" | "all-but-one-idle":
            work = {rank for plan in plans for kind in PassKind for rank in ranks if _rows(plan, kind, rank)}
            assert len(ranks) - len(work) == (1 if load.name == "one-idle" else len(ranks) - 1), sorted(work)
        case "prefill-while-decoding":
            other = 1 if len(ranks) > 1 else 0
            both = [p for p in plans if _rows(p, PassKind.PREFILL, 0) and _rows(p, PassKind.VERIFY, other)]
            assert len(both) >= 3, "the long prompt did not come in chunks beside decodes"
        case "staggered":
            counts = {sum(_rows(plan, PassKind.VERIFY, rank) for rank in ranks) for plan in plans}
            assert len(counts) >= 3, "all requests ended together"
            worked = [bool(plan.passes) for plan in plans]
            assert any(worked[worked.index(False) :]), "no rank had to start after all were idle"
        case "crowded":
            assert any(of_rank.num_preemptions for of_rank in seen), "every rank had blocks enough"
        case _:
            raise AssertionError(f"nothing is known of the load {load.name!r}")
    captured = sum(pass_plan.tier != EAGER for plan in plans for pass_plan in plan.passes)
    assert (captured > 0) == job.tiers, f"{captured} passes had a tier"
    crosses = job.target == "moe"
    for rank, of_rank in enumerate(seen):
        if job.tiers and crosses and job.drafter in ("none", "moe"):
            assert of_rank.num_replays == captured, f"rank {rank} replayed {of_rank.num_replays} of {captured} passes"
        assert (of_rank.num_replays > 0) == (captured > 0 and (crosses or bool(of_rank.requests))), f"rank {rank}"


def _rows(plan: StepPlan, kind: PassKind, rank: int) -> int:
    pass_plan = plan.find(kind)
    return pass_plan.tokens[rank].value if pass_plan is not None else 0


def _check_experts(shape: Topology, job: Job, seen: Sequence[Seen]) -> None:
    """Over all ranks, experts computed exactly the real rows times top-k of every expert layer.

    Without expert parallelism each rank computes a slice of every row's experts; padding is then not masked, and tiers
    have some.
    """
    expected_models = {name for name, model in (("target", job.target), ("drafter", job.drafter)) if model == "moe"}
    copies = shape.world_size if job.experts == "slices" else 1
    masked = job.experts != "slices" and shape.world_size > 1
    rows = _real_rows(shape, job, seen)
    for of_rank in seen:
        assert of_rank.expert_load.keys() == expected_models
    for model in expected_models:
        expected = copies * rows[model] * fixtures.MOE["num_experts_per_tok"] * SPARSE_LAYERS[model]
        found = sum(of_rank.expert_load[model] for of_rank in seen)
        assert expected > 0
        if masked or not job.tiers:
            assert found == expected, f"{model}: experts computed {found} rows, not {expected}"
        else:
            assert found >= expected, f"{model}: {found} rows, padding included, for {expected} real ones"


def _real_rows(shape: Topology, job: Job, seen: Sequence[Seen]) -> dict[str, int]:
    """Rows through each model, over data-parallel ranks: prompts and blocks by the plans, windows by what was offered.

    What was offered are the rows that were verified, anchors apart; the plans admit as many, and more where confidence
    cuts windows short.
    """
    plans, ranks = seen[0].plans, range(shape.data_parallel_size)
    planned = {kind: sum(_rows(plan, kind, rank) for plan in plans for rank in ranks) for kind in PassKind}
    leaders = [of_rank for rank, of_rank in enumerate(seen) if shape.is_leader(rank)]
    specs = [ran.spec for of_rank in leaders for ran in of_rank.requests.values()]
    verified = sum(spec.rounds + spec.offered for spec in specs)
    if job.drafter == "perfect":
        assert sum(spec.emitted for spec in specs) > 1.5 * sum(spec.rounds for spec in specs), "nothing was accepted"
    cut = planned[PassKind.VERIFY] - verified
    assert (cut > 0) if job.confidence_threshold else (cut == 0), f"{cut} rows fewer than planned were verified"
    return {"target": planned[PassKind.PREFILL] + verified, "drafter": planned[PassKind.DRAFT]}


def _check_request(job: Job, arrival: Arrival, ran: Ran, references: References) -> str:
    """The place of a tie that fell otherwise, or ""."""
    with_drafter = references.get(job.target, job.drafter, arrival, threshold=job.confidence_threshold)
    alone = references.get(job.target, "none", arrival) if arrival.params.is_greedy else with_drafter
    expected = alone.ran.token_ids
    if ran.token_ids == expected:
        assert ran.spec == with_drafter.ran.spec, f"{arrival.request_id}: {ran.spec}, alone {with_drafter.ran.spec}"
        return ""
    position = next((i for i, (a, b) in enumerate(zip(ran.token_ids, expected, strict=False)) if a != b), -1)
    what = f"{job.name}: request {arrival.request_id} differs at position {position}"
    assert position >= 0, f"{what}: {len(ran.token_ids)} tokens, not {len(expected)}"
    assert arrival.params.is_greedy, f"{what}, which is seeded: {ran.token_ids}, not {expected}"
    first, second = alone.logprobs[position].top[:2]
    gap = first.logprob - second.logprob
    assert gap < TIE, f"{what}, where the two best tokens are {gap:.2e} apart: {ran.token_ids}, not {expected}"
    return f"{what}, gap {gap:.1e}"
