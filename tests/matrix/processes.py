"""Runs the cells of a topology in one set of rank processes: spawning costs more than most cells."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from datetime import timedelta

from tests.matrix.cells import Job, Models, Seen, run_jobs
from tests.matrix.loads import Load
from tests.parallel.ranks import run_ranks

from outrider.parallel.topology import Topology

COLLECTIVE_TIMEOUT = timedelta(seconds=60)
TOPOLOGY_TIMEOUT_S = 1500.0


@dataclass(slots=True)
class Report:
    cells: int = 0
    ties: list[str] = field(default_factory=list)
    seconds: dict[str, float] = field(default_factory=dict)  # by topology: its processes, from spawn to end


REPORT = Report()  # one a test process, for the summary below


class Processes:
    """Runs all cells of a topology in one set of rank processes, when the first of them is asked for."""

    def __init__(self, models: Models) -> None:
        self._models = models
        self._seen: dict[tuple[Topology, tuple[Job, ...]], list[list[list[Seen]]]] = {}

    def seen(self, shape: Topology, jobs: tuple[Job, ...], *, job: Job, load: Load) -> list[Seen]:
        """Of the cell (job, load), by rank; ``jobs`` are all that run in these processes."""
        key = (shape, jobs)
        if key not in self._seen:
            start = time.monotonic()
            self._seen[key] = run_ranks(
                shape,
                run_jobs,
                jobs,
                self._models,
                timeout=TOPOLOGY_TIMEOUT_S,
                collective_timeout=COLLECTIVE_TIMEOUT,
            )
            name = f"dp{shape.data_parallel_size} tp{shape.tensor_parallel_size}"
            REPORT.seconds[name] = time.monotonic() - start
        return [of_rank[jobs.index(job)][job.loads.index(load)] for of_rank in self._seen[key]]
