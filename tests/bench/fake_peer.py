"""A peer whose answers are arithmetic: it runs in a real process, behind the real protocol."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from outrider.bench.peers.protocol import CannotRunError, Peer, Workload
from outrider.bench.served import Run, Served
from outrider.outputs import SpecCounters


@dataclass(frozen=True, slots=True, kw_only=True)
class FakePeer:
    module: ClassVar[str] = "outrider"
    distributions: ClassVar[tuple[str, ...]] = ("pytest", "no-such-distribution")
    name: str
    journal: str  # a file that every peer adds a line to for each workload
    seconds_per_token: float = 0.01  # as it claims
    max_streams: int = 99
    load_error: str = ""
    dies_at_temperature: float = -1.0

    def load(self) -> Peer:
        if self.load_error:
            raise OSError(self.load_error)
        return LoadedFakePeer(self)


class LoadedFakePeer:
    def __init__(self, spec: FakePeer) -> None:
        self._spec = spec

    def generate(self, workload: Workload) -> Run:
        spec = self._spec
        if workload.streams > spec.max_streams:
            raise CannotRunError(f"serves {spec.max_streams} streams")
        if workload.temperature == spec.dies_at_temperature:
            os._exit(3)
        began = time.monotonic_ns()
        time.sleep(0.01)
        seconds = spec.seconds_per_token * workload.max_tokens
        with Path(spec.journal).open("a", encoding="utf-8") as journal:
            fields = (
                spec.name, os.getpid(), began, time.monotonic_ns(), workload.streams, workload.temperature,
                workload.max_tokens, workload.seed, os.environ["OMP_NUM_THREADS"], workload.prompts,
            )  # fmt: skip
            journal.write(repr(fields) + "\n")
        served = tuple(
            Served(
                num_tokens=workload.max_tokens,
                ttft_s=seconds / 10,
                e2e_s=seconds,
                token_ids=(prompt[-1],) * workload.max_tokens,
            )
            for prompt in workload.prompts
        )
        return Run(served=served, elapsed_s=seconds * len(served) / workload.streams, spec=SpecCounters())
