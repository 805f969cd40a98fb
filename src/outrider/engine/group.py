"""The front of a group of ranks: an ``Engine`` whose steps run elsewhere.

Requests are checked here by the rules that ranks apply too, so that bad input is refused at once; the rest go to the
data-parallel rank that owes the fewest tokens and stay there. All ranks of that rank's attention-TP group get the same
commands, and every rank is woken, since all step together (``engine.rank_loop``).

Counts of waiting requests are the front's own: what it has handed out and no rank has reported as running waits.
One failed rank ends the group: from then on every call raises ``EngineDeadError``, and no process is left.
"""

from __future__ import annotations

import dataclasses
import random
import time
import weakref
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from outrider.config import EngineConfig
from outrider.engine.balancer import Balancer
from outrider.engine.links import RankLinks
from outrider.engine.messages import Abort, Add, Wake
from outrider.engine.request_rules import RequestRules
from outrider.errors import EngineDeadError, InvalidRequestError
from outrider.models.tokenizer import Tokenizer
from outrider.outputs import CompletionOutput, EngineStats, RequestOutput, RequestTiming, SpecCounters
from outrider.parallel.topology import Topology
from outrider.sampling_params import SamplingParams
from outrider.scheduler.admission import require_room
from outrider.spec_decode.counters import merge_counters

_CHECK_S = 1.0  # between looks at the clock while ranks are silent
_SILENCE_MARGIN_S = 5.0  # ranks notice one another's absence first, and know more


@dataclass(slots=True, kw_only=True)
class _Live:
    """An unfinished request, with the newest snapshot that was handed out."""

    number: int
    dp_rank: int
    params: SamplingParams
    arrival_time: float
    latest: RequestOutput

    @property
    def num_unfinished(self) -> int:
        return sum(completion.finish_reason is None for completion in self.latest.outputs)


class EngineGroup:
    def __init__(
        self,
        links: RankLinks,
        *,
        topology: Topology,
        config: EngineConfig,
        tokenizer: Tokenizer,
        vocab_size: int,
        eos_token_ids: tuple[int, ...],
        timeout_s: float,
    ) -> None:
        """``links`` to ranks that are all ready; ``config``: what one rank runs on, the queue's limit the group's."""
        self.config = config
        self.tokenizer = tokenizer
        self.vocab_size = vocab_size
        self._links = links
        self._topology = topology
        self._leaders = topology.attn_dp_ranks(0)
        self._rules = RequestRules.of(config, vocab_size=vocab_size, eos_token_ids=eos_token_ids)
        self._seeds = random.Random(config.seed)
        self._timeout_s = timeout_s
        self._balancer = Balancer(topology.data_parallel_size)
        self._live: dict[str, _Live] = {}
        self._request_ids: dict[int, str] = {}  # of the live ones, by number
        self._next_number = 0
        self._num_unfinished = 0  # sequences of live requests
        self._work_since = 0.0  # when there was last nothing to do
        self._death: EngineDeadError | None = None
        self._reaper = weakref.finalize(self, links.end, orderly=True)  # also where nobody closes the group

    # ---- requests

    @property
    def has_unfinished(self) -> bool:
        return bool(self._live)

    def add_request(
        self, *, request_id: str, prompt: str | None, prompt_token_ids: Sequence[int], params: SamplingParams
    ) -> None:
        self._raise_if_dead()
        if request_id in self._live:
            raise InvalidRequestError(f"request_id={request_id!r} is in use already", param="request_id")
        self._rules.check(prompt_token_ids, params)
        require_room(params.n, num_waiting=self._num_waiting(), max_waiting=self.config.max_num_waiting)
        if params.seed is None:
            params = dataclasses.replace(params, seed=self._seeds.getrandbits(64))
        if not self._live:
            self._work_since = time.monotonic()
        live = _Live(
            number=self._next_number,
            dp_rank=self._balancer.choose(),
            params=params,
            arrival_time=time.perf_counter(),
            latest=_nothing_yet(request_id, prompt, tuple(prompt_token_ids), params.n),
        )
        self._next_number += 1
        self._live[request_id] = live
        self._request_ids[live.number] = request_id
        self._num_unfinished += params.n
        self._balancer.add(live.number, rank=live.dp_rank, tokens=self._tokens_owed(live))
        add = Add(number=live.number, prompt_token_ids=tuple(prompt_token_ids), params=params)
        for rank in self._ranks_of(live):
            self._links.send(rank, add)
        self._links.send_all(Wake())

    def abort(self, request_id: str) -> RequestOutput | None:
        """As ``Engine.abort``; the snapshot holds what had been handed out, and its rank learns of it later."""
        live = self._live.get(request_id)
        if live is None:
            return None
        self._forget(request_id)
        for rank in self._ranks_of(live):
            self._links.send(rank, Abort(number=live.number))
        completions = (
            dataclasses.replace(completion, finish_reason=completion.finish_reason or "abort")
            for completion in live.latest.outputs
        )
        timing = dataclasses.replace(live.latest.timing, e2e_s=time.perf_counter() - live.arrival_time)
        return dataclasses.replace(live.latest, outputs=tuple(completions), finished=True, timing=timing)

    # ---- the step

    def step(self) -> list[RequestOutput]:
        self._raise_if_dead()
        if not self._live:
            return []
        self._links.wait(timeout_s=_CHECK_S)
        self._check_ranks()
        outputs = []
        for snapshot in self._links.take_snapshots():
            request_id = self._request_ids.get(int(snapshot.request_id))
            if request_id is not None:  # else it was aborted meanwhile
                outputs.append(self._adopt(request_id, snapshot))
        return outputs

    def wait(self) -> None:
        self._raise_if_dead()
        self._links.take_snapshots()  # of requests that were aborted
        self._links.wait(timeout_s=_CHECK_S)
        self._check_ranks()

    def interrupt(self) -> None:
        self._links.interrupt()

    def _adopt(self, request_id: str, snapshot: RequestOutput) -> RequestOutput:
        """The rank's snapshot with the prompt put back; what the request still costs is counted anew."""
        live = self._live[request_id]
        before = live.num_unfinished
        live.latest = dataclasses.replace(
            snapshot,
            request_id=request_id,
            prompt=live.latest.prompt,
            prompt_token_ids=live.latest.prompt_token_ids,
        )
        self._num_unfinished += live.num_unfinished - before
        if live.latest.finished:
            self._forget(request_id)
        else:
            self._balancer.update(live.number, tokens=self._tokens_owed(live))
        return live.latest

    # ---- what ranks are

    def stats(self) -> EngineStats:
        merged = merge_stats(self.rank_stats())
        return dataclasses.replace(merged, num_waiting=self._num_waiting(), expert_load=self._expert_load())

    def rank_stats(self) -> tuple[EngineStats, ...]:
        return tuple(self._links.stats(rank) or self._unheard() for rank in self._leaders)

    @property
    def process_ids(self) -> list[int]:
        """Of the ranks' processes on this machine, in rank order; also when they have ended."""
        return self._links.process_ids

    def close(self) -> None:
        if self._death is None:
            for request_id in list(self._live):
                self.abort(request_id)
            self._death = EngineDeadError("the engine is closed")
        self._reaper()

    def _expert_load(self) -> dict[str, tuple[int, ...]]:
        """Rows of every expert: summed over the ranks that hold whole ones; where all hold slices, any rank's."""
        every = [self._links.stats(rank) or NO_STATS for rank in range(self._topology.world_size)]
        if not self._topology.enable_expert_parallel:
            return every[0].expert_load
        models = {name for stats in every for name in stats.expert_load}
        loads = {name: [stats.expert_load[name] for stats in every if name in stats.expert_load] for name in models}
        return {name: tuple(map(sum, zip(*each, strict=True))) for name, each in loads.items()}

    def _unheard(self) -> EngineStats:
        return dataclasses.replace(
            NO_STATS, kv_blocks_total=self.config.num_kv_blocks, kv_blocks_free=self.config.num_kv_blocks
        )

    def _check_ranks(self) -> None:
        """Raise EngineDeadError, for this and every later call, once a rank has failed or all are silent too long."""
        limit_s = self._timeout_s + _SILENCE_MARGIN_S
        quiet_s = min(self._links.silent_s, time.monotonic() - self._work_since)
        if self._links.failed:
            reason = self._links.diagnose()
        elif self._live and quiet_s > limit_s:
            reason = f"no rank answers, for {quiet_s:.0f} s (distributed_timeout_seconds={self._timeout_s:g})"
        else:
            return
        self._death = EngineDeadError(f"the group of ranks has ended: {reason}")
        self._links.end(orderly=False)
        self._live.clear()
        raise self._death

    def _raise_if_dead(self) -> None:
        if self._death is not None:
            raise self._death

    # ---- bookkeeping

    def _ranks_of(self, live: _Live) -> tuple[int, ...]:
        return self._topology.attn_tp_ranks(self._leaders[live.dp_rank])

    def _forget(self, request_id: str) -> None:
        live = self._live.pop(request_id)
        del self._request_ids[live.number]
        self._num_unfinished -= live.num_unfinished
        self._balancer.remove(live.number)

    def _tokens_owed(self, live: _Live) -> int:
        num_prompt = len(live.latest.prompt_token_ids)
        most = self._rules.max_total_tokens(num_prompt, live.params) - num_prompt
        running = [c for c in live.latest.outputs if c.finish_reason is None]
        return sum((most - len(c.token_ids)) + (0 if c.token_ids else num_prompt) for c in running)

    def _num_waiting(self) -> int:
        running = sum(stats.num_running for stats in self.rank_stats())
        return max(0, self._num_unfinished - running)


NO_STATS = EngineStats(
    num_running=0,
    num_waiting=0,
    kv_blocks_total=0,
    kv_blocks_free=0,
    prompt_tokens_total=0,
    generation_tokens_total=0,
    requests_finished={},
    preemptions_total=0,
    prefix_cache_queries=0,
    prefix_cache_hits=0,
    spec=SpecCounters(),
    steps_total=0,
)


def merge_stats(parts: Sequence[EngineStats]) -> EngineStats:
    """Sums over data-parallel ranks; the steps and replays that they take together count once.

    Left out is ``expert_load``, whose experts are spread over more ranks than these.
    """
    finished: Counter[str] = Counter()
    for part in parts:
        finished.update(part.requests_finished)
    sums = {
        name: sum(getattr(part, name) for part in parts)
        for name in (
            "num_running", "num_waiting", "kv_blocks_total", "kv_blocks_free", "prompt_tokens_total",
            "generation_tokens_total", "preemptions_total", "prefix_cache_queries", "prefix_cache_hits",
            "undrafted_tokens_total",
        )
    }  # fmt: skip
    return EngineStats(
        **sums,
        requests_finished=dict(finished),
        spec=merge_counters(part.spec for part in parts),
        steps_total=max((part.steps_total for part in parts), default=0),
        graph_replays_total=max((part.graph_replays_total for part in parts), default=0),
        expert_parallel_size=max((part.expert_parallel_size for part in parts), default=1),
    )


def _nothing_yet(request_id: str, prompt: str | None, prompt_token_ids: tuple[int, ...], n: int) -> RequestOutput:
    completions = (
        CompletionOutput(index=index, text="", token_ids=(), logprobs=None, finish_reason=None, stop_reason=None)
        for index in range(n)
    )
    return RequestOutput(
        request_id=request_id,
        prompt=prompt,
        prompt_token_ids=prompt_token_ids,
        outputs=tuple(completions),
        finished=False,
        timing=RequestTiming(),
    )
