"""Captured passes as CUDA graphs: recorded once per key at start-up, replayed on refreshed static buffers.

Contract: what ``GraphRunner`` says. A replay launches the recorded kernels on the captured addresses, so everything
that changes from step to step is in the static buffers, and nothing in the forward may read a device tensor on the
host. NCCL's collectives are recorded like kernels; transports whose shapes follow from the routing are never asked for
in a captured pass. Outputs stay where the capture put them and are kept alive here, so that no other graph of the
shared memory pool takes their place.

How a forward is recorded is a ``Graph``'s matter; the bookkeeping around it is the same for each.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar, cast

import torch

from outrider.batch.forward_batch import PassInputs
from outrider.batch.step_plan import EAGER
from outrider.errors import ConfigError
from outrider.runner.graph_runner import GraphKey
from outrider.runner.static_inputs import StaticInputs, on_device

P = TypeVar("P", bound=PassInputs)
T = TypeVar("T")
_WARM_UPS = 2  # libraries choose kernels and take workspaces at first use, which cannot be recorded


class Graph(Protocol):
    """One recorded forward."""

    @property
    def num_bytes(self) -> int:
        """Device memory that the recording holds."""
        ...

    def capture(self, forward: Callable[[], T]) -> T:
        """Record ``forward``, which reads static buffers; what it gave, whose tensors each replay overwrites."""
        ...

    def replay(self) -> None:
        """Run what was recorded on what the buffers hold now."""
        ...


@dataclass(frozen=True, slots=True)
class _Captured:
    static: StaticInputs
    graph: Graph
    outputs: object


class CudaGraphRunner:
    """Replays each captured pass on buffers of its own, refreshed from the step's batch."""

    capable = True

    def __init__(
        self, tiers: Sequence[int], *, device: torch.device, new_graph: Callable[[], Graph] | None = None
    ) -> None:
        """``new_graph`` makes what records one key; without it CUDA graphs of one pool, on a CUDA device only."""
        self.tiers = tuple(tiers)
        self.num_replays = 0
        self._device = device
        self._new_graph = new_graph or _cuda_graphs(device)
        self._captured: dict[GraphKey, _Captured] = {}

    @property
    def captured_keys(self) -> frozenset[GraphKey]:
        return frozenset(self._captured)

    @property
    def static_bytes(self) -> int:
        return sum(captured.static.num_bytes + captured.graph.num_bytes for captured in self._captured.values())

    def capture(self, key: GraphKey, inputs: P, forward: Callable[[P], T]) -> None:
        """Register every tensor of ``inputs`` and record ``forward`` on the buffers."""
        assert key.requests.value in self.tiers, f"{key} is of no tier in {self.tiers}"
        assert key not in self._captured, f"{key} is captured already"
        static = StaticInputs(inputs, device=self._device)
        on_buffers = static.refresh(inputs)
        graph = self._new_graph()
        outputs = graph.capture(lambda: forward(on_buffers))
        self._captured[key] = _Captured(static, graph, outputs)

    def run(self, key: GraphKey, inputs: P, forward: Callable[[P], T]) -> T:
        if key.requests.value == EAGER:
            return forward(on_device(inputs, self._device))
        assert key in self._captured, f"{key} was not captured"
        captured = self._captured[key]
        captured.static.refresh(inputs)
        captured.graph.replay()
        self.num_replays += 1
        return cast(T, captured.outputs)  # of the forward that was captured under this key


class CudaGraph:
    """``Graph`` of recorded kernels. Those of one ``pool`` (torch's handle) share memory: no two replay at once."""

    def __init__(self, *, device: torch.device, pool: Any, side_stream: torch.cuda.Stream) -> None:
        self.num_bytes = 0
        self._device = device
        self._pool = pool
        self._side_stream = side_stream
        self._graph = torch.cuda.CUDAGraph()

    def capture(self, forward: Callable[[], T]) -> T:
        current = torch.cuda.current_stream(self._device)
        self._side_stream.wait_stream(current)
        with torch.cuda.stream(self._side_stream):
            for _ in range(_WARM_UPS):
                forward()
        current.wait_stream(self._side_stream)
        torch.cuda.synchronize(self._device)
        torch.cuda.empty_cache()
        before = torch.cuda.memory_reserved(self._device)
        # Other threads of the process, the collectives' watchdog among them, may go on calling CUDA.
        with torch.cuda.graph(
            self._graph, pool=self._pool, stream=self._side_stream, capture_error_mode="thread_local"
        ):
            outputs = forward()
        self.num_bytes = max(0, torch.cuda.memory_reserved(self._device) - before)
        return outputs

    def replay(self) -> None:
        self._graph.replay()


def _cuda_graphs(device: torch.device) -> Callable[[], Graph]:
    """Graphs of one memory pool on ``device``. Raises ConfigError where it is no CUDA device, or absent."""
    if device.type != "cuda":
        raise ConfigError(f"CUDA graphs are recorded on a CUDA device; device={str(device)!r} is none")
    if not torch.cuda.is_available():
        raise ConfigError(f"device={str(device)!r} is absent: torch finds no CUDA device")
    with torch.cuda.device(device):
        pool, side_stream = torch.cuda.graph_pool_handle(), torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    return lambda: CudaGraph(device=device, pool=pool, side_stream=side_stream)
