"""What the step agreement costs as data-parallel ranks are added: time of ``plan_step``, bytes of the one all-gather.

    python benchmarks/plan_scaling.py [--steps 200] [--max-num-seqs 64]

No rank runs: rows of ranks under random loads are planned as every rank would plan them once they are gathered. Times
are those of the processor, so that what else the machine does is not in them. Bytes are those of the integers that a
rank brings and of what it holds after the gather. A table, then one JSON line.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass

from rich.console import Console
from rich.table import Table
from torch import Tensor

from outrider.batch.step_plan import EAGER, IDLE_ROW, PassKind, PassWidths, RankRow, plan_step
from outrider.batch.tiers import capture_sizes
from outrider.cli.json_output import print_json_line
from outrider.engine.agreement import StepAgreement

NUM_SPECULATIVE_TOKENS = 7
WIDTHS = PassWidths(draft=NUM_SPECULATIVE_TOKENS, verify=1 + NUM_SPECULATIVE_TOKENS)
RANK_COUNTS = tuple(2**k for k in range(10))  # 1 .. 512


@dataclass(frozen=True, slots=True, kw_only=True)
class Scaling:
    ranks: int
    plan_us: float  # plan_step, median over steps
    agree_us: float  # what the agreement does with gathered rows, and plan_step; the transport is not in it
    agree_us_p95: float
    row_bytes: int  # what one rank brings
    gathered_bytes: int  # what every rank holds after the all-gather
    share_in_tiers: float  # of verify passes


class GatheredRows:
    """Stands for the all-gather: hands back the rows of ``num_ranks`` ranks, the own one first."""

    rank = 0

    def __init__(self, num_ranks: int) -> None:
        self.size = num_ranks
        self.others: list[tuple[int, ...]] = []  # encoded
        self.row_integers = 0

    def all_gather_row(self, row: Sequence[int]) -> list[tuple[int, ...]]:
        self.row_integers = len(row)
        own = tuple(row)
        control = own[len(IDLE_ROW.encode()) :]
        return [own, *((*other, *control) for other in self.others)]

    def all_reduce(self, x: Tensor) -> Tensor:
        raise AssertionError("the agreement gathers one row and does nothing else")

    def all_gather(self, x: Tensor) -> Tensor:
        raise AssertionError("the agreement gathers one row and does nothing else")

    def reduce_scatter(self, x: Tensor) -> Tensor:
        raise AssertionError("the agreement gathers one row and does nothing else")

    def all_to_all(self, x: Tensor, send_counts: Sequence[int], receive_counts: Sequence[int]) -> Tensor:
        raise AssertionError("the agreement gathers one row and does nothing else")


def random_row(rng: random.Random, max_num_seqs: int) -> RankRow:
    """A busy rank, one in eight idle and one in four with a chunk to prefill besides."""
    requests = 0 if rng.random() < 0.125 else rng.randint(1, max_num_seqs)
    prefills = rng.random() < 0.25
    return RankRow(
        prefill_requests=int(prefills),
        prefill_tokens=rng.randint(1, 512) if prefills else 0,
        prefill_logit_rows=int(prefills),
        draft_requests=requests,
        verify_requests=requests,
        verify_tokens=rng.randint(requests, requests * WIDTHS.verify),
        graph_capable=1,
    )


def measure(num_ranks: int, *, steps: int, max_num_seqs: int, seed: int = 0) -> Scaling:
    """Figures of one number of ranks over ``steps`` random steps."""
    rng = random.Random(seed)
    communicator, tiers = GatheredRows(num_ranks), capture_sizes(max_num_seqs)
    agreement = StepAgreement(communicator)
    plan_us, agree_us, verify_tiers = [], [], []
    for _ in range(steps):
        own, *others = (random_row(rng, max_num_seqs) for _ in range(num_ranks))
        communicator.others = [row.encode() for row in others]
        start = time.thread_time()
        rows = agreement.gather(own, num_unfinished=own.verify_requests)
        gathered = time.thread_time()
        plan = plan_step(rows, tiers=tiers, widths=WIDTHS)
        end = time.thread_time()
        plan_us.append((end - gathered) * 1e6)
        agree_us.append((end - start) * 1e6)
        verify = plan.find(PassKind.VERIFY)
        if verify is not None:
            verify_tiers.append(verify.tier > EAGER)
    row_bytes = communicator.row_integers * 8
    return Scaling(
        ranks=num_ranks,
        plan_us=statistics.median(plan_us),
        agree_us=statistics.median(agree_us),
        agree_us_p95=sorted(agree_us)[int(0.95 * (steps - 1))],
        row_bytes=row_bytes,
        gathered_bytes=row_bytes * num_ranks,
        share_in_tiers=statistics.fmean(verify_tiers) if verify_tiers else 0.0,
    )


def render(figures: Sequence[Scaling], console: Console) -> None:
    table = Table("ranks", "plan_step us", "agree + plan us", "95th percentile", "row bytes", "gathered bytes")
    for f in figures:
        table.add_row(
            str(f.ranks),
            f"{f.plan_us:.0f}",
            f"{f.agree_us:.0f}",
            f"{f.agree_us_p95:.0f}",
            str(f.row_bytes),
            str(f.gathered_bytes),
        )
    console.print(table)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--max-num-seqs", type=int, default=64)
    given = parser.parse_args(arguments)
    if given.steps < 1 or given.max_num_seqs < 1:
        parser.error(f"steps={given.steps} and max_num_seqs={given.max_num_seqs} must be at least 1")
    figures = [measure(ranks, steps=given.steps, max_num_seqs=given.max_num_seqs) for ranks in RANK_COUNTS]
    render(figures, Console())
    print_json_line({"steps": given.steps, "max_num_seqs": given.max_num_seqs, "scaling": [asdict(f) for f in figures]})


if __name__ == "__main__":
    main()
