"""How a pass's forward is executed: eagerly, or by replaying a captured graph. One protocol, keyed by ``GraphKey``.

Contract of a runner: ``tiers`` are the request counts it has captured, offered to the step plan; ``run`` gets the key
of the batch at hand and its forward. A runner that was handed a key with a tier it has not captured raises: falling
back to eager on one rank alone would hang the others.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, Protocol, TypeVar

from outrider.batch.counts import PaddedTokenCount, RequestCount
from outrider.batch.step_plan import EAGER, PassKind, PassPlan

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class GraphKey:
    """Everything a graph is specialised on."""

    model: Literal["target", "drafter"]
    kind: PassKind
    requests: RequestCount  # the tier; zero when eager
    tokens: PaddedTokenCount

    @classmethod
    def of(cls, plan: PassPlan, rank: int) -> GraphKey:
        return cls(
            model="drafter" if plan.kind is PassKind.DRAFT else "target",
            kind=plan.kind,
            requests=RequestCount(plan.tier),
            tokens=plan.padded_tokens[rank],
        )


class GraphRunner(Protocol):
    @property
    def tiers(self) -> tuple[int, ...]:
        """Captured numbers of requests, ascending."""
        ...

    def run(self, key: GraphKey, forward: Callable[[], T]) -> T: ...


class EagerRunner:
    """Captures nothing and runs everything as it comes."""

    @property
    def tiers(self) -> tuple[int, ...]:
        return ()

    def run(self, key: GraphKey, forward: Callable[[], T]) -> T:
        assert key.requests.value == EAGER, f"{key} asks for a captured graph; this runner has none"
        return forward()
