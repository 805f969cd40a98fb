"""What an engine must be for ``bench peers``: described by a spec, loaded once in a process of its own, asked in turn.

A spec is plain data and travels to that process by pickle, so its module must be importable where the engine is not
installed: the engine is imported in ``load``, and not before. This module imports neither torch nor numpy, since what
a process imports counts as its memory.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Protocol

from outrider.bench.served import Run


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """Prompts for a closed loop of ``streams``: so many are in flight, and the next starts when one ends.

    Every request gets ``max_tokens`` tokens whatever they are, end-of-text tokens included. Request i may use the seed
    ``seed + i``; no other sampling parameter than the temperature is in force, so that all draw from the same
    distribution.
    """

    prompts: tuple[tuple[int, ...], ...]  # token ids; nothing is to be added to them
    temperature: float  # 0: greedy
    streams: int
    max_tokens: int
    seed: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What every peer gets and must have room for."""

    threads: int
    max_streams: int
    max_request_tokens: int  # the longest prompt and its answer


class CannotRunError(Exception):
    """The peer has no such mode; the text says which."""


class Peer(Protocol):
    """A loaded engine in one mode."""

    def generate(self, workload: Workload) -> Run:
        """Serve the whole workload, times counted from the request's own start. Raises CannotRunError.

        Nothing of an earlier call may be reused: no prefix cache.
        """
        ...


class PeerSpec(Protocol):
    """A peer that is not loaded yet."""

    module: ClassVar[str]  # its import name; what cannot be found is not installed
    distributions: ClassVar[tuple[str, ...]]  # whose versions are reported

    def load(self) -> Peer:
        """Load it, in the process that will run it."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Loaded:
    load_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    run: Run
    peak_rss_bytes: int  # of the peer's process, from its start


@dataclass(frozen=True, slots=True, kw_only=True)
class Refusal:
    """The peer cannot run that, and is fit for other work."""

    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """The peer is not to be asked again."""

    reason: str


Reply = Loaded | Answer | Refusal | Failure
