"""A cell of the matrix: one engine set-up under one load, run on every rank of a topology in lock-step.

Contract: ``run_jobs`` runs on each rank, builds a job's engine once and drives it through the job's loads, adding a
load's requests at the steps its script names; all attention-TP ranks of a data-parallel rank add the same. It ends a
load when the step agreement says that no rank holds a request, on all ranks at the same step. What it returns is what a
rank saw; who compares it with what is right is ``checks``. Worst fault: a cell that runs less than it says, which
``checks`` finds by looking at the plans.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from tests import fixtures
from tests.matrix.loads import MAX_MODEL_LEN, SEATS, TOKEN_BUDGET, Load

from outrider.batch.step_plan import StepPlan
from outrider.config import EngineArgs
from outrider.engine.engine_core import EngineCore
from outrider.engine.setup import build_engine, topology_of
from outrider.outputs import SpecCounters
from outrider.parallel.recording import CollectiveCall, recorded
from outrider.parallel.state import ParallelState

Experts = Literal["slices", "gather", "alltoall"]  # without expert parallelism; with it, over either transport
AMPLE, TIGHT = 40, 9  # KV blocks of a rank: all seats at full length, or about half of what ``crowded`` wants


@dataclass(frozen=True, slots=True, kw_only=True)
class Models:
    """Checkpoint directories by name."""

    targets: dict[str, str]
    drafters: dict[str, str]  # also "none"


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """An engine set-up, and the loads to drive it through."""

    target: str
    drafter: str
    experts: Experts
    tiers: bool
    loads: tuple[Load, ...]
    num_blocks: int = AMPLE
    confidence_threshold: float = 0.0  # above 0: fewer rows are verified than the plan admits

    @property
    def name(self) -> str:
        parts = [self.target, self.drafter, self.experts, "tiers" if self.tiers else "eager"]
        return "-".join(parts + (["cut"] if self.confidence_threshold else []))


@dataclass(frozen=True, slots=True, kw_only=True)
class Ran:
    """One request on one rank."""

    token_ids: tuple[int, ...]
    spec: SpecCounters


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """What one rank saw of one cell."""

    dp_rank: int
    requests: dict[str, Ran]
    num_steps: int
    plans: tuple[StepPlan, ...]  # of every step
    calls: tuple[str, ...]  # collectives in their order: group and name
    expert_load: dict[str, int]  # by model: rows that this rank's experts computed
    blocks_held: int  # after the last request has gone
    num_replays: int
    num_preemptions: int


def engine_args(job: Job, models: Models, *, dp: int, tp: int) -> EngineArgs:
    return EngineArgs(
        model=models.targets[job.target],
        draft=models.drafters[job.drafter],
        max_model_len=MAX_MODEL_LEN,
        max_num_seqs=SEATS,
        max_num_batched_tokens=TOKEN_BUDGET,
        kv_cache_memory_bytes=job.num_blocks * _block_bytes(job, tp),
        draft_confidence_threshold=job.confidence_threshold,
        enforce_eager=not job.tiers,
        quantization="none",  # tensor parallelism and experts are torch's
        data_parallel_size=dp,
        tensor_parallel_size=tp,
        enable_expert_parallel=job.experts != "slices",
        all2all_backend="alltoall" if job.experts == "alltoall" else "allgather_reducescatter",
    )


def _block_bytes(job: Job, tp: int) -> int:
    """Keys and values of 16 tokens on one rank: its share of the target's heads, and all of the drafter's."""
    heads = fixtures.LAYERS * fixtures.KV_HEADS // tp
    heads += fixtures.DRAFT_LAYERS * fixtures.KV_HEADS if job.drafter != "none" else 0
    return 16 * 2 * heads * fixtures.HEAD_DIM * 4


def run_jobs(parallel: ParallelState, jobs: Sequence[Job], models: Models) -> list[list[Seen]]:
    """What this rank saw: by job, by load."""
    return [_run_job(parallel, job, models) for job in jobs]


def _run_job(parallel: ParallelState, job: Job, models: Models) -> list[Seen]:
    shape = parallel.topology
    args = engine_args(job, models, dp=shape.data_parallel_size, tp=shape.tensor_parallel_size)
    record: list[CollectiveCall] = []
    # The groups are the same whatever becomes of the experts.
    state = recorded(dataclasses.replace(parallel, topology=topology_of(args)), record)
    where = "its start-up"
    try:
        core = build_engine(args, parallel=state)
        seen = []
        for load in job.loads:
            where = load.name
            record.clear()
            seen.append(_run_load(core, load, state.attn_dp.rank, record))
        return seen
    except BaseException as error:
        error.add_note(f"in {job.name}, {where}")
        raise


def _run_load(core: EngineCore, load: Load, dp_rank: int, record: list[CollectiveCall]) -> Seen:
    before = core.stats()
    requests: dict[str, Ran] = {}
    plans: list[StepPlan] = []
    while len(plans) <= load.last_step or not core.agreement.all_idle:
        for arrival in load.at(len(plans), dp_rank):
            core.add_request(
                request_id=arrival.request_id, prompt=None, prompt_token_ids=arrival.prompt, params=arrival.params
            )
        for output in core.step():
            if output.finished:
                requests[output.request_id] = Ran(token_ids=output.outputs[0].token_ids, spec=output.spec)
        assert core.plan is not None
        plans.append(core.plan)
    after = core.stats()
    return Seen(
        dp_rank=dp_rank,
        requests=requests,
        num_steps=after.steps_total - before.steps_total,
        plans=tuple(plans),
        calls=tuple(f"{call.group}.{call.name}" for call in record),
        expert_load={model: sum(rows) - sum(before.expert_load[model]) for model, rows in after.expert_load.items()},
        blocks_held=after.kv_blocks_total - after.kv_blocks_free,
        num_replays=after.graph_replays_total - before.graph_replays_total,
        num_preemptions=after.preemptions_total - before.preemptions_total,
    )
