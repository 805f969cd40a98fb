"""What the front process and the ranks say to each other. Frozen and picklable; sent over authenticated connections.

To a rank its messages come in one order, the same for all ranks of its attention-TP group: how many of them a step
takes is agreed, so that these ranks, which compute the same requests, take the same ones at the same step.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from outrider.config import EngineArgs
from outrider.engine.engine_core import EngineCore
from outrider.outputs import EngineStats, RequestOutput
from outrider.parallel.state import ParallelState
from outrider.sampling_params import SamplingParams


class BuildEngine(Protocol):
    """Makes a rank's engine; a module-level function, since its name travels to the rank."""

    def __call__(self, args: EngineArgs, *, parallel: ParallelState) -> EngineCore: ...


# ---- from the front to a rank


@dataclass(frozen=True, slots=True, kw_only=True)
class Start:
    """The first message: what to build, the same for every rank, and where the ranks find one another."""

    args: EngineArgs  # nothing of it is left for a rank to decide, least of all by its own free memory
    build: BuildEngine
    store_host: str
    store_port: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Add:
    """Take a request. Its seed is set: ranks that share it must not each draw one."""

    number: int  # the front's own; never used twice
    prompt_token_ids: tuple[int, ...]
    params: SamplingParams


@dataclass(frozen=True, slots=True, kw_only=True)
class Abort:
    number: int


@dataclass(frozen=True, slots=True)
class Wake:
    """Sent to all ranks after every ``Add`` and ``Shutdown``."""


@dataclass(frozen=True, slots=True)
class Shutdown:
    """Leave, together with all others, after the step in which the last rank has taken this."""


Command = Add | Abort | Wake | Shutdown


# ---- from a rank to the front


@dataclass(frozen=True, slots=True, kw_only=True)
class Hello:
    rank: int
    args: EngineArgs | None  # of the command line this rank was started by, where that is not the front's own


@dataclass(frozen=True, slots=True)
class Ready:
    """The engine is built."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outputs:
    """What a step gave; also a sign of life. Of an attention-TP group only the leader tells snapshots."""

    snapshots: tuple[RequestOutput, ...]  # request_id is the number; only what is new, see ``engine.deltas``
    stats: EngineStats


@dataclass(frozen=True, slots=True, kw_only=True)
class Died:
    """The rank ends by an error. ``is_collective``: it waited for another rank in vain, so the fault is elsewhere."""

    error_type: str
    message: str
    traceback: str
    is_collective: bool


Report = Hello | Ready | Outputs | Died
