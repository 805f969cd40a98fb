"""This engine as one of the peers: drafting off, prompt lookup, or the drafter."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from outrider.bench.peers.protocol import Limits, Peer, Workload
from outrider.bench.served import Run
from outrider.config import EngineArgs, ProposerName

if TYPE_CHECKING:
    from outrider.engine.engine import Engine


@dataclass(frozen=True, slots=True, kw_only=True)
class Outrider:
    module: ClassVar[str] = "outrider"
    distributions: ClassVar[tuple[str, ...]] = ("torch",)
    args: EngineArgs
    proposer: ProposerName
    limits: Limits

    def load(self) -> Peer:
        from outrider.bench.contenders import Contenders

        contenders = Contenders.resolved(self.args)
        room = contenders.room(together=self.limits.max_streams, longest=self.limits.max_request_tokens)
        return LoadedOutrider(contenders.build(self.proposer, num_kv_tokens=room))


class LoadedOutrider:
    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def generate(self, workload: Workload) -> Run:
        from outrider.bench.run import run_requests
        from outrider.bench.workload import BenchRequest, SamplingPlan

        plan = SamplingPlan(
            max_tokens=workload.max_tokens,
            temperature=workload.temperature,
            top_p=1.0,
            ignore_eos=True,
            sampling_seed=workload.seed,
        )
        requests = [
            BenchRequest(text=None, chat=False, token_ids=prompt, params=plan.params(index))
            for index, prompt in enumerate(workload.prompts)
        ]
        return run_requests(self._engine, requests, max_concurrency=workload.streams)
