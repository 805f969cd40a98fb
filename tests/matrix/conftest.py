"""Models, references and rank processes that the cells share, and the count at the end of a run."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests import fixtures
from tests.matrix.cells import Models
from tests.matrix.checks import References
from tests.matrix.processes import REPORT, Processes


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    root: Path = tmp_path_factory.mktemp("matrix")
    return Models(
        targets={
            "moe": str(fixtures.make_moe_target(root / "moe-target")),
            "cycle": str(fixtures.make_cycle_target(root / "cycle-target")),
        },
        drafters={
            "none": "none",
            "dense": str(fixtures.make_random_drafter(root / "dense-drafter")),
            "moe": str(fixtures.make_moe_drafter(root / "moe-drafter")),
            "perfect": str(fixtures.make_perfect_drafter(root / "perfect-drafter")),
        },
    )


@pytest.fixture(scope="session")
def references(models: Models) -> References:
    return References(models)


@pytest.fixture(scope="session")
def processes(models: Models) -> Processes:
    return Processes(models)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if REPORT.cells:
        times = ", ".join(f"{name} {seconds:.0f} s" for name, seconds in REPORT.seconds.items())
        terminalreporter.write_line(
            f"matrix: {REPORT.cells} cells, {len(REPORT.ties)} numerical ties; ranks ran {times}"
        )
        for tie in REPORT.ties:
            terminalreporter.write_line(f"  tie: {tie}")
