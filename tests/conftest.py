"""Suite-wide settings: few threads (machines have two cores), deterministic hypothesis."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator

import pytest
import torch
from hypothesis import HealthCheck, settings
from tests.kernel_builds import EMULATED, built

from outrider.models import packed_cache
from outrider.ops.native_kernels import Kernels, load_kernels

torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "2")))
settings.register_profile(
    "outrider", derandomize=True, deadline=None, max_examples=50, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("outrider")


@pytest.fixture(scope="session")
def kernels() -> Kernels:
    found = load_kernels()
    if found is None:
        pytest.skip("no C++ compiler")
    return found


@pytest.fixture(params=["native", "emulated"])
def both_kernels(request: pytest.FixtureRequest, kernels: Kernels) -> Kernels:
    """This machine's, and those that run attention over bfloat16 through tiles whether it has any or not."""
    return kernels if request.param == "native" else built(EMULATED, threads=2)


@pytest.fixture(scope="session", autouse=True)
def _packed_weights_of_tests(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Fixture models leave nothing in the user's cache. Commands that tests run as processes do use it."""
    directory = tmp_path_factory.mktemp("packed")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(packed_cache, "packed_directory", lambda: directory)
        yield


@pytest.fixture
def log(caplog: pytest.LogCaptureFixture) -> Iterator[pytest.LogCaptureFixture]:
    """The package's log does not reach the root logger, where pytest listens."""
    logger = logging.getLogger("outrider")
    logger.addHandler(caplog.handler)
    yield caplog
    logger.removeHandler(caplog.handler)
