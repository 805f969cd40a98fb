"""Every feature on every topology, on real rank processes: the tokens are those of one rank, the steps are agreed.

A cell is a topology, an engine set-up and a load. All cells of a topology run in one set of processes. The quick slice
is part of ``make test``; ``make test-matrix`` runs everything.
"""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from tests.matrix.cells import TIGHT, Experts, Job
from tests.matrix.checks import References, check_cell
from tests.matrix.loads import Load, ample_loads, busy, crowded, one_idle, prefill_while_decoding
from tests.matrix.processes import REPORT, Processes

from outrider.parallel.topology import Topology

TOPOLOGIES = ((1, 1), (1, 2), (2, 1), (2, 2), (4, 1))
EXPERTS: tuple[Experts, ...] = ("slices", "gather", "alltoall")
CUT: tuple[tuple[Experts, bool], ...] = (("gather", False), ("gather", True), ("alltoall", False))


def topology(dp: int, tp: int) -> Topology:
    """Of the groups; what becomes of experts is a job's."""
    return Topology(data_parallel_size=dp, tensor_parallel_size=tp, enable_expert_parallel=False)


def jobs(dp: int, tp: int) -> tuple[Job, ...]:
    """All engine set-ups of a topology."""
    ample = ample_loads(dp)
    made = [
        Job(target="moe", drafter=drafter, experts=experts, tiers=tiers, loads=ample)
        for drafter in ("none", "dense", "moe")
        for experts in EXPERTS
        for tiers in (False, True)
        if experts != "alltoall" or dp * tp > 1  # one rank sends nothing
    ]
    made.append(Job(target="moe", drafter="moe", experts="gather", tiers=True, loads=(crowded(dp),), num_blocks=TIGHT))
    if dp > 1:
        made += [
            Job(target="moe", drafter="moe", experts=experts, tiers=tiers, loads=(busy(dp),), confidence_threshold=0.5)
            for experts, tiers in CUT
        ]
    if dp > 1 and tp == 1:
        made += [
            Job(
                target="cycle",
                drafter="perfect",
                experts="slices",
                tiers=tiers,
                loads=ample_loads(dp, decode_tokens=64),
            )
            for tiers in (False, True)
        ]
    return tuple(made)


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    dp: int
    tp: int
    job: Job
    load: Load

    def __str__(self) -> str:
        return f"dp{self.dp}-tp{self.tp}-{self.job.name}-{self.load.name}"


CELLS = [Cell(dp=dp, tp=tp, job=job, load=load) for dp, tp in TOPOLOGIES for job in jobs(dp, tp) for load in job.loads]
QUICK_LOADS = (one_idle(2), prefill_while_decoding(2))
QUICK_JOBS = tuple(
    Job(target="moe", drafter="moe", experts="gather", tiers=tiers, loads=QUICK_LOADS) for tiers in (False, True)
)


@pytest.mark.matrix
@pytest.mark.timeout(1800)  # the first cell of a topology waits for all of them
@pytest.mark.parametrize("cell", CELLS, ids=str)
def test_cell(cell: Cell, processes: Processes, references: References, request: pytest.FixtureRequest) -> None:
    shape = topology(cell.dp, cell.tp)
    names = {item.name for item in request.session.items}  # what -k and the like have left
    chosen = [other for other in CELLS if f"test_cell[{other}]" in names]
    together = tuple(dict.fromkeys(other.job for other in chosen if (other.dp, other.tp) == (cell.dp, cell.tp)))
    seen = processes.seen(shape, together, job=cell.job, load=cell.load)
    REPORT.ties += check_cell(shape, cell.job, cell.load, seen, references)
    REPORT.cells += 1


@pytest.mark.parametrize("load", QUICK_LOADS, ids=lambda load: load.name)
@pytest.mark.parametrize("job", QUICK_JOBS, ids=lambda job: job.name)
def test_quick_slice(job: Job, load: Load, processes: Processes, references: References) -> None:
    """Two data-parallel ranks with experts on each, target and drafter; no numerical tie."""
    seen = processes.seen(topology(2, 1), QUICK_JOBS, job=job, load=load)
    assert check_cell(topology(2, 1), job, load, seen, references) == []
