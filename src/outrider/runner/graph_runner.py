"""How a pass's forward is executed: eagerly, or by replaying what was captured. One protocol, keyed by ``GraphKey``.

Contract of a runner: ``tiers`` are the request counts it captures, offered to the step plan; ``capable`` is its vote in
the step agreement; ``capture`` is called once for every key at start-up; ``run`` gets the key of the pass at hand, its
inputs and its forward. Without a tier every runner just runs. A tier that was not captured raises: falling back to
eager on one rank alone would hang the others.

``StaticRunner`` is what a captured runner is without a graph: it owns the static buffers, refreshes and checks them,
and then runs the forward on them. It is the CPU's runner; ``runner.cuda_graph_runner`` replays recorded kernels.

Every runner takes inputs that lie on the host and runs the forward on ``device``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol, TypeVar

import torch

from outrider.batch.counts import PaddedTokenCount, RequestCount
from outrider.batch.forward_batch import PassInputs
from outrider.batch.step_plan import EAGER, PassKind, PassPlan
from outrider.runner.static_inputs import StaticInputs, on_device

P = TypeVar("P", bound=PassInputs)
T = TypeVar("T")
CPU = torch.device("cpu")


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

    @property
    def capable(self) -> bool:
        """This rank's vote: whether it can replay. One rank that cannot makes the step eager on all of them."""
        ...

    @property
    def captured_keys(self) -> frozenset[GraphKey]: ...

    @property
    def static_bytes(self) -> int:
        """What the static buffers of all captured keys take, and the graphs themselves."""
        ...

    @property
    def num_replays(self) -> int:
        """Passes run from a captured key since start-up."""
        ...

    def capture(self, key: GraphKey, inputs: P, forward: Callable[[P], T]) -> None: ...

    def run(self, key: GraphKey, inputs: P, forward: Callable[[P], T]) -> T:
        """What ``forward`` gives; of a captured key valid until the key is run again, which may overwrite it."""
        ...


class EagerRunner:
    """Captures nothing and runs everything as it comes."""

    tiers: tuple[int, ...] = ()
    capable = False
    captured_keys: frozenset[GraphKey] = frozenset()
    static_bytes = 0
    num_replays = 0

    def __init__(self, device: torch.device = CPU) -> None:
        self._device = device

    def capture(self, key: GraphKey, inputs: P, forward: Callable[[P], T]) -> None:
        raise AssertionError(f"{key} was to be captured by a runner that captures nothing")

    def run(self, key: GraphKey, inputs: P, forward: Callable[[P], T]) -> T:
        assert key.requests.value == EAGER, f"{key} asks for a captured graph; this runner has none"
        return forward(on_device(inputs, self._device))


class StaticRunner:
    """Runs each captured pass on buffers of its own, refreshed from the step's batch: static shapes, no graph."""

    capable = True

    def __init__(self, tiers: Sequence[int], *, device: torch.device = CPU) -> None:
        self.tiers = tuple(tiers)
        self._device = device
        self.num_replays = 0
        self._static: dict[GraphKey, StaticInputs] = {}

    @property
    def captured_keys(self) -> frozenset[GraphKey]:
        return frozenset(self._static)

    @property
    def static_bytes(self) -> int:
        return sum(static.num_bytes for static in self._static.values())

    def capture(self, key: GraphKey, inputs: P, forward: Callable[[P], T]) -> None:
        """Register every tensor of ``inputs`` and run once on them."""
        assert key.requests.value in self.tiers, f"{key} is of no tier in {self.tiers}"
        assert key not in self._static, f"{key} is captured already"
        static = StaticInputs(inputs, device=self._device)
        forward(static.refresh(inputs))
        self._static[key] = static

    def run(self, key: GraphKey, inputs: P, forward: Callable[[P], T]) -> T:
        if key.requests.value == EAGER:
            return forward(on_device(inputs, self._device))
        assert key in self._static, f"{key} was not captured"
        self.num_replays += 1
        return forward(self._static[key].refresh(inputs))
