"""Suite-wide settings: few threads (machines have two cores), deterministic hypothesis."""

from __future__ import annotations

import os

import torch
from hypothesis import HealthCheck, settings

torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "2")))
settings.register_profile(
    "outrider", derandomize=True, deadline=None, max_examples=50, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("outrider")
