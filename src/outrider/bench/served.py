"""What requests got, and when: the record that every way of running a workload gives (no torch).

The record alone is imported by processes that run somebody else's engine, whose memory is measured.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from outrider.outputs import SpecCounters
from outrider.spec_decode.counters import merge_counters


@dataclass(frozen=True, slots=True, kw_only=True)
class Served:
    """What one request got."""

    num_tokens: int
    ttft_s: float
    e2e_s: float
    token_ids: tuple[int, ...] = ()  # empty over HTTP, where text comes back
    spec: SpecCounters = field(default_factory=SpecCounters)  # empty over HTTP, where only the sum is known

    @property
    def decode_s(self) -> float:
        """From the first token to the last."""
        return self.e2e_s - self.ttft_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """A workload from its first request to its last token."""

    served: tuple[Served, ...]  # in the order of the requests
    elapsed_s: float
    spec: SpecCounters

    @property
    def num_tokens(self) -> int:
        return sum(served.num_tokens for served in self.served)

    @property
    def requests_per_s(self) -> float:
        return len(self.served) / self.elapsed_s

    @property
    def output_tokens_per_s(self) -> float:
        return self.num_tokens / self.elapsed_s

    @property
    def decode_tokens_per_s(self) -> float:
        """Of one stream after its first token, all streams weighed by their time; 0.0 without second tokens."""
        seconds = sum(served.decode_s for served in self.served)
        return sum(max(served.num_tokens - 1, 0) for served in self.served) / seconds if seconds > 0 else 0.0

    @classmethod
    def joined(cls, parts: Sequence[Run]) -> Run:
        """Runs that came one after another, without what lay between them."""
        return cls(
            served=tuple(served for part in parts for served in part.served),
            elapsed_s=sum(part.elapsed_s for part in parts),
            spec=merge_counters(part.spec for part in parts),
        )
