"""What this process knows of its ranks. Frozen; a module receives only the group it uses.

A group of size 1 is a no-op, so that the single process is the trivial case of the same code.
"""

from __future__ import annotations

from dataclasses import dataclass

from outrider.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """One rank's place among the ranks that share something."""

    rank: int
    size: int

    def __post_init__(self) -> None:
        if not 0 <= self.rank < self.size:
            raise ConfigError(f"parallel group: rank={self.rank} must lie in 0..{self.size - 1} (size={self.size})")


@dataclass(frozen=True, slots=True, kw_only=True)
class ParallelState:
    attn_dp: Group  # ranks that hold different requests

    @classmethod
    def single(cls) -> ParallelState:
        return cls(attn_dp=Group(rank=0, size=1))
