"""The life of one rank between start and end: take the front's commands, step, tell, and sleep when nobody has work.

Contract: every rank of the world runs this loop, in lock-step through ``core.step``'s agreement. What could part the
ranks is decided by agreed numbers only. Within an attention-TP group, whose ranks hold the same requests, a step takes
the commands that all of its ranks have received (the least of their counts, one small gather; none with one rank).
Over the data-parallel ranks, idleness, sleep and the end follow from the gathered rows: see ``engine.agreement``.
Worst fault: a rank that sleeps, or leaves, while another waits for it in a collective.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Protocol

from outrider.engine.agreement import StepAgreement
from outrider.engine.deltas import SnapshotEncoder
from outrider.engine.messages import Abort, Add, Command, Outputs, Shutdown, Wake
from outrider.logger import get_logger
from outrider.outputs import CompletionOutput, EngineStats, RequestOutput
from outrider.parallel.communicator import Communicator
from outrider.sampling_params import SamplingParams

logger = get_logger(__name__)

HEARTBEAT_S = 0.5


class StepCore(Protocol):
    """What the loop needs of an engine core."""

    agreement: StepAgreement

    def add_request(
        self, *, request_id: str, prompt: str | None, prompt_token_ids: Sequence[int], params: SamplingParams
    ) -> None: ...

    def abort(self, request_id: str) -> RequestOutput | None: ...

    def step(self) -> list[RequestOutput]: ...

    def stats(self) -> EngineStats: ...


class Inbox:
    """The front's commands in their order. One thread puts them in, the loop takes them out."""

    def __init__(self) -> None:
        self._commands: deque[Command] = deque()
        self._num_received = 0
        self._num_taken = 0
        self._num_wakes = 0
        self._changed = threading.Condition()

    def put(self, command: Command) -> None:
        with self._changed:
            self._commands.append(command)
            self._num_received += 1
            self._num_wakes += isinstance(command, Wake)
            self._changed.notify_all()

    @property
    def num_received(self) -> int:
        return self._num_received

    def take_until(self, number: int) -> list[Command]:
        """The commands up to the ``number``-th of all, those taken before left out; so many have been received."""
        with self._changed:
            assert self._num_taken <= number <= self._num_received, (self._num_taken, number, self._num_received)
            taken = [self._commands.popleft() for _ in range(number - self._num_taken)]
            self._num_taken = number
            return taken

    def sleep_until_wakes_exceed(self, number: int) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self._num_wakes > number)


class RankLoop:
    def __init__(self, core: StepCore, inbox: Inbox, *, attn_tp: Communicator, tell: Callable[[Outputs], None]) -> None:
        """``tell`` reaches the front."""
        self._core = core
        self._inbox = inbox
        self._attn_tp = attn_tp
        self._tell = tell
        self._encoder = SnapshotEncoder()
        self._told_at = time.monotonic()

    def run(self) -> None:
        """Until the front says ``Shutdown`` to all. Whatever a step raises ends the rank."""
        agreement = self._core.agreement
        while not agreement.all_stopping:
            outputs = self._take_commands()
            outputs += self._core.step()
            if outputs or agreement.all_idle or time.monotonic() - self._told_at > HEARTBEAT_S:
                self._tell(Outputs(snapshots=tuple(map(self._encoder.encode, outputs)), stats=self._core.stats()))
                self._told_at = time.monotonic()
            if agreement.all_idle and not agreement.all_stopping:
                self._inbox.sleep_until_wakes_exceed(agreement.least_wakes)

    def _take_commands(self) -> list[RequestOutput]:
        """Carry out what this step takes; snapshots of requests that end by it."""
        received = self._attn_tp.all_gather_row((self._inbox.num_received,))
        outputs = []
        for command in self._inbox.take_until(min(count for (count,) in received)):
            match command:
                case Add():
                    refusal = self._add(command)
                    outputs += [refusal] if refusal is not None else []
                case Abort():
                    ended = self._core.abort(str(command.number))
                    outputs += [ended] if ended is not None else []
                case Wake():
                    self._core.agreement.num_wakes += 1
                case Shutdown():
                    self._core.agreement.stopping = True
        return outputs

    def _add(self, command: Add) -> RequestOutput | None:
        """A request that cannot be taken, though the front let it pass, ends alone: the snapshot that says so."""
        try:
            self._core.add_request(
                request_id=str(command.number),
                prompt=None,
                prompt_token_ids=command.prompt_token_ids,
                params=command.params,
            )
            return None
        except Exception as error:
            logger.exception("request %d cannot be taken", command.number)
            completions = (
                CompletionOutput(
                    index=index,
                    text="",
                    token_ids=(),
                    logprobs=None,
                    finish_reason="error",
                    stop_reason=None,
                    error=f"{type(error).__name__}: {error}",
                )
                for index in range(command.params.n)
            )
            return RequestOutput(
                request_id=str(command.number),
                prompt=None,
                prompt_token_ids=(),
                outputs=tuple(completions),
                finished=True,
            )
