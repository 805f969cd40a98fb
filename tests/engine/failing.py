"""A proposer that breaks in the middle of a step, to see what an engine makes of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from outrider.batch.step_plan import PassPlan, StepPlan
from outrider.config import EngineArgs
from outrider.engine.engine_core import EngineCore
from outrider.engine.setup import build_engine
from outrider.errors import CheckpointError
from outrider.parallel.state import ParallelState
from outrider.sampling.proposal import Proposal
from outrider.spec_decode.proposer import DraftRequest, Proposer


@dataclass
class FailingProposer:
    """Behaves like another but for one call of ``propose``, which raises."""

    inner: Proposer
    fuse: int  # calls until then

    @property
    def num_speculative_tokens(self) -> int:
        return self.inner.num_speculative_tokens

    @property
    def draft_width(self) -> int:
        return self.inner.draft_width

    @property
    def tap_layer_ids(self) -> tuple[int, ...]:
        return self.inner.tap_layer_ids

    def capture(self, plan: PassPlan) -> None:
        self.inner.capture(plan)

    def propose(self, plan: StepPlan, requests: Sequence[DraftRequest]) -> Proposal:
        self.fuse -= 1
        if self.fuse == -1:
            raise RuntimeError("the drafter broke")
        return self.inner.propose(plan, requests)

    def write_context(self, *, taps_NF: Tensor, positions_N: Tensor, slots_N: Tensor) -> None:
        self.inner.write_context(taps_NF=taps_NF, positions_N=positions_N, slots_N=slots_N)


def core_failing_at_step(fuse: int) -> type[EngineCore]:
    """An engine core whose proposer breaks once."""

    class FailingCore(EngineCore):
        def __init__(self, *, proposer: Proposer, **rest: object) -> None:
            super().__init__(proposer=FailingProposer(proposer, fuse), **rest)  # type: ignore[arg-type]

    return FailingCore


def build_with_failing_rank(args: EngineArgs, *, parallel: ParallelState, rank: int, fuse: int) -> EngineCore:
    """``build_engine``, but that the proposer of one rank breaks; for ranks that are processes of their own."""
    core = build_engine(args, parallel=parallel)
    if parallel.rank == rank:
        core._proposer = FailingProposer(core._proposer, fuse)
    return core


def build_that_fails(args: EngineArgs, *, parallel: ParallelState, rank: int) -> EngineCore:
    """An engine that cannot be built on one rank."""
    if parallel.rank == rank:
        raise CheckpointError("model.safetensors: no tensor 'lm_head'")
    return build_engine(args, parallel=parallel)
