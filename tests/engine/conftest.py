from __future__ import annotations

from pathlib import Path

import pytest
from tests.engine.zoo import BackEnd, Zoo

from outrider.ops.native_kernels import load_kernels


@pytest.fixture(scope="session")
def _zoo_root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("zoo")


@pytest.fixture(scope="session")
def zoo(request: pytest.FixtureRequest, _zoo_root: Path) -> Zoo:
    """On torch modules; ``zoo.on_every_back_end`` runs a test on the compiled passes as well."""
    back_end: BackEnd = getattr(request, "param", "torch")
    if back_end != "torch" and load_kernels() is None:
        pytest.skip("no C++ compiler")
    return Zoo(_zoo_root, back_end=back_end)
