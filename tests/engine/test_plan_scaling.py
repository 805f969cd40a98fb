"""The benchmark of the plan over many ranks measures what an engine's agreement really gathers."""

from __future__ import annotations

import json
from collections.abc import Sequence

import pytest
from benchmarks import plan_scaling

from outrider.batch.step_plan import IDLE_ROW
from outrider.engine.agreement import StepAgreement
from outrider.parallel.communicator import SingleRankCommunicator


class CountingCommunicator(SingleRankCommunicator):
    def __init__(self) -> None:
        self.integers = 0

    def all_gather_row(self, row: Sequence[int]) -> list[tuple[int, ...]]:
        self.integers = len(row)
        return super().all_gather_row(row)


def test_bytes_are_those_of_the_agreements_row() -> None:
    communicator = CountingCommunicator()
    StepAgreement(communicator).gather(IDLE_ROW, num_unfinished=0)
    for ranks in (1, 4, 512):
        figures = plan_scaling.measure(ranks, steps=2, max_num_seqs=64)
        assert figures.row_bytes == 8 * communicator.integers
        assert figures.gathered_bytes == ranks * figures.row_bytes
        assert 0 < figures.plan_us <= figures.agree_us


def test_it_ends_in_a_json_line(capsys: pytest.CaptureFixture[str]) -> None:
    plan_scaling.main(["--steps", "1"])
    report = json.loads(capsys.readouterr().out.strip().splitlines()[-1])
    assert [row["ranks"] for row in report["scaling"]] == [1, 2, 4, 8, 16, 32, 64, 128, 256, 512]
