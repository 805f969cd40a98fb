"""Suite-wide settings: few threads (machines have two cores), deterministic hypothesis."""

from __future__ import annotations

import os

import pytest
import torch
from hypothesis import HealthCheck, settings

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
