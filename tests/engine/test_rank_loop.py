"""The ranks' loop on simulated ranks: no request is left behind, no rank steps alone, and all leave together.

Ranks are threads over communicators that check every collective against the others' (``parallel.simulated``): a rank
that sleeps or leaves while another waits for it is an error there, and a group that could not go on at all is one too.
Commands reach each rank through a pipe of its own, with random delays, as from a front that was interrupted anywhere.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from datetime import timedelta

import pytest

from outrider import SamplingParams
from outrider.batch.step_plan import IDLE_ROW
from outrider.engine.agreement import StepAgreement
from outrider.engine.group import NO_STATS
from outrider.engine.messages import Abort, Add, Command, Outputs, Shutdown, Wake
from outrider.engine.rank_loop import Inbox, RankLoop
from outrider.errors import InvalidRequestError
from outrider.outputs import CompletionOutput, EngineStats, FinishReason, RequestOutput
from outrider.parallel.simulated import Simulation
from outrider.parallel.state import ParallelState
from outrider.parallel.topology import Topology

REFUSED = 13  # a token that the core does not take
TIMEOUT = timedelta(seconds=60)


@dataclass
class CountingCore:
    """A core whose requests last ``max_tokens`` steps; it records in which step it did what."""

    agreement: StepAgreement
    unfinished: dict[str, int] = field(default_factory=dict)
    log: list[tuple[int, str, str]] = field(default_factory=list)  # step, what, request
    num_steps: int = 0
    num_idle_steps: int = 0

    def add_request(
        self, *, request_id: str, prompt: str | None, prompt_token_ids: Sequence[int], params: SamplingParams
    ) -> None:
        if REFUSED in prompt_token_ids:
            raise InvalidRequestError("prompt: unlucky", param="prompt")
        assert params.max_tokens is not None
        self.unfinished[request_id] = params.max_tokens
        self.log.append((self.num_steps, "add", request_id))

    def abort(self, request_id: str) -> RequestOutput | None:
        if self.unfinished.pop(request_id, None) is None:
            return None
        self.log.append((self.num_steps, "abort", request_id))
        return snapshot(request_id, "abort")

    def step(self) -> list[RequestOutput]:
        self.agreement.gather(IDLE_ROW, num_unfinished=len(self.unfinished))
        self.num_steps += 1
        self.num_idle_steps += self.agreement.all_idle
        ended = [request_id for request_id, left in self.unfinished.items() if left == 1]
        self.unfinished = {r: left - 1 for r, left in self.unfinished.items() if left > 1}
        self.log += [(self.num_steps, "end", request_id) for request_id in ended]
        return [snapshot(request_id, "length") for request_id in ended]

    def stats(self) -> EngineStats:
        return replace(NO_STATS, num_running=len(self.unfinished), steps_total=self.num_steps)


def snapshot(request_id: str, reason: FinishReason) -> RequestOutput:
    completion = CompletionOutput(
        index=0, text="", token_ids=(1,), logprobs=None, finish_reason=reason, stop_reason=None
    )
    return RequestOutput(request_id=request_id, prompt="p", prompt_token_ids=(1,), outputs=(completion,), finished=True)


class Pipe:
    """Delivers commands to one rank in order, each after a random delay."""

    def __init__(self, inbox: Inbox, seed: str, most_s: float) -> None:
        self._inbox = inbox
        self._rng = random.Random(seed)
        self._most_s = most_s
        self._pending: list[Command] = []
        self._changed = threading.Condition()
        self._closed = False
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def send(self, command: Command) -> None:
        with self._changed:
            self._pending.append(command)
            self._changed.notify()

    def close(self) -> None:
        with self._changed:
            self._closed = True
            self._changed.notify()
        self._thread.join()

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._pending or self._closed)
                if not self._pending:
                    return
                command = self._pending.pop(0)
            time.sleep(self._rng.choice((0, 0, self._most_s * self._rng.random())))
            self._inbox.put(command)


class Front:
    """Sends as ``EngineGroup`` does, and remembers what it was told."""

    def __init__(self, topology: Topology, inboxes: Sequence[Inbox], *, seed: int, delay_s: float) -> None:
        self.topology = topology
        self.ended: dict[str, str] = {}
        self.changed = threading.Condition()
        self._pipes = [Pipe(inbox, f"{seed}-{rank}", delay_s) for rank, inbox in enumerate(inboxes)]

    def add(self, number: int, *, dp_rank: int, steps: int, token: int = 1) -> None:
        params = SamplingParams(max_tokens=steps, seed=number)
        self._send(dp_rank, Add(number=number, prompt_token_ids=(token,), params=params))
        self._send_all(Wake())

    def abort(self, number: int, *, dp_rank: int) -> None:
        self._send(dp_rank, Abort(number=number))

    def shutdown(self) -> None:
        self._send_all(Shutdown())
        self._send_all(Wake())
        for pipe in self._pipes:
            pipe.close()

    def hear(self, outputs: Outputs) -> None:
        with self.changed:
            for output in outputs.snapshots:
                assert (output.prompt, output.prompt_token_ids) == (None, ()), "the front has the prompt"
                assert output.request_id not in self.ended, f"request {output.request_id} ended twice"
                self.ended[output.request_id] = output.outputs[0].finish_reason or ""
            self.changed.notify_all()

    def wait_for(self, condition: Callable[[], bool]) -> None:
        with self.changed:
            assert self.changed.wait_for(condition, 60), f"left behind: only {sorted(self.ended)} ended"

    def _send(self, dp_rank: int, command: Command) -> None:
        leader = self.topology.attn_dp_ranks(0)[dp_rank]
        for rank in self.topology.attn_tp_ranks(leader):
            self._pipes[rank].send(command)

    def _send_all(self, command: Command) -> None:
        for pipe in self._pipes:
            pipe.send(command)


def run_ranks(
    topology: Topology, script: Callable[[Front], None], *, seed: int, delay_s: float = 0.003
) -> list[CountingCore]:
    """``script`` against ranks that run until it ends; their cores afterwards."""
    inboxes = [Inbox() for _ in range(topology.world_size)]
    front = Front(topology, inboxes, seed=seed, delay_s=delay_s)

    def rank(parallel: ParallelState) -> CountingCore:
        core = CountingCore(StepAgreement(parallel.attn_dp))
        tell = front.hear if topology.is_leader(parallel.rank) else lambda outputs: None
        inboxes[parallel.rank].sleep_until_wakes_exceed(0)
        RankLoop(core, inboxes[parallel.rank], attn_tp=parallel.attn_tp, tell=tell).run()
        return core

    failures: list[BaseException] = []

    def drive() -> None:
        try:
            script(front)
        except BaseException as error:
            failures.append(error)
        front.shutdown()

    driver = threading.Thread(target=drive)
    driver.start()
    cores = Simulation(topology, timeout=TIMEOUT).run(rank)
    driver.join()
    if failures:
        raise failures[0]
    return cores


def check_lock_step(topology: Topology, cores: Sequence[CountingCore]) -> None:
    """As many steps everywhere, and the same history on all ranks that share requests."""
    assert len({core.num_steps for core in cores}) == 1, [core.num_steps for core in cores]
    for rank, core in enumerate(cores):
        assert core.log == cores[topology.attn_tp_ranks(rank)[0]].log, f"rank {rank} parted from its leader"


TOPOLOGIES = [
    Topology(data_parallel_size=dp, tensor_parallel_size=tp, enable_expert_parallel=False)
    for dp, tp in ((1, 2), (2, 1), (2, 2), (4, 1))
]


@pytest.mark.parametrize("topology", TOPOLOGIES, ids=lambda t: f"dp{t.data_parallel_size}tp{t.tensor_parallel_size}")
@pytest.mark.parametrize("seed", range(6))
def test_no_request_is_left_behind(topology: Topology, seed: int) -> None:
    rng = random.Random(seed)
    aborted: set[int] = set()
    total = 40

    def script(front: Front) -> None:
        for number in range(total):
            dp_rank = rng.randrange(topology.data_parallel_size)
            front.add(number, dp_rank=dp_rank, steps=rng.choice((1, 1, 2, 5)), token=REFUSED if number == 7 else 1)
            if rng.random() < 0.2:
                front.abort(number, dp_rank=dp_rank)
                aborted.add(number)
            if rng.random() < 0.5:  # let all of them fall asleep now and then, or nearly
                front.wait_for(lambda number=number: len(front.ended) == number + 1)  # type: ignore[misc]
                time.sleep(rng.choice((0, 0.001, 0.004)))
        front.wait_for(lambda: len(front.ended) == total)
        assert front.ended["7"] == "error", "refused alone"
        ended = {number: reason for number, reason in front.ended.items() if int(number) not in aborted | {7}}
        assert set(ended.values()) == {"length"}

    check_lock_step(topology, run_ranks(topology, script, seed=seed))


def test_idle_ranks_sleep() -> None:
    """A hundred requests one after another take a few steps each, however long the pauses are."""
    topology = TOPOLOGIES[2]

    def script(front: Front) -> None:
        for number in range(50):
            front.add(number, dp_rank=number % 2, steps=1)
            front.wait_for(lambda number=number: len(front.ended) == number + 1)  # type: ignore[misc]
            time.sleep(0.01)

    cores = run_ranks(topology, script, seed=0, delay_s=0.0)
    check_lock_step(topology, cores)
    assert cores[0].num_idle_steps <= 3 * 50 + 5, "a step for work, and few to agree that there is none"


@pytest.mark.parametrize(("wakes", "least"), [((3, 2), 2), ((2, 2), 2), ((2, 5), 2)])
def test_sleep_follows_the_least_count(wakes: tuple[int, int], least: int) -> None:
    """Whoever has taken more calls than another does not sleep on its own count: the other is about to wake."""

    def rank(parallel: ParallelState) -> tuple[bool, bool, int]:
        agreement = StepAgreement(parallel.attn_dp)
        agreement.num_wakes = wakes[parallel.rank]
        agreement.stopping = parallel.rank == 0
        agreement.gather(IDLE_ROW, num_unfinished=0)
        return agreement.all_idle, agreement.all_stopping, agreement.least_wakes

    assert Simulation(TOPOLOGIES[1]).run(rank) == [(True, False, least)] * 2


def test_one_rank_with_work_keeps_all_awake() -> None:
    def rank(parallel: ParallelState) -> bool:
        agreement = StepAgreement(parallel.attn_dp)
        agreement.gather(IDLE_ROW, num_unfinished=parallel.rank)
        return agreement.all_idle

    assert Simulation(TOPOLOGIES[1]).run(rank) == [False, False]
