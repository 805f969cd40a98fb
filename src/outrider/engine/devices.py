"""Which device an engine runs on: what ``--device`` means, and which of a machine's devices a rank takes.

The devices of a machine are taken in order by its ranks, one each. What is absent is refused by name, before weights
load.
"""

from __future__ import annotations

import os
from pathlib import Path

import torch

from outrider.config import DeviceName, EngineArgs, launcher_from_environment
from outrider.errors import ConfigError
from outrider.runner.graph_runner import CPU


def resolve_device(args: EngineArgs) -> DeviceName:
    """Raises ConfigError where a CUDA device is asked for that this machine does not have."""
    if args.device == "cpu" or (args.device == "auto" and not torch.cuda.is_available()):
        return "cpu"
    if not torch.cuda.is_available():
        raise ConfigError(f"device={args.device!r} is absent: torch finds no CUDA device here")
    found, needed = torch.cuda.device_count(), ranks_of_machine(args)
    if needed > found:
        raise ConfigError(
            f"device={args.device!r}: {needed} ranks run on this machine, one to a CUDA device; it has {found}"
        )
    return "cuda"


def device_of_rank(args: EngineArgs, name: DeviceName, rank: int) -> torch.device:
    """The device of one of this machine's ranks, whose number in the world is ``rank``."""
    return CPU if name == "cpu" else torch.device("cuda", rank % ranks_of_machine(args))


def ranks_of_machine(args: EngineArgs) -> int:
    launcher = launcher_from_environment() if args.world_size > 1 else None
    return args.world_size // args.nnodes if launcher is None else launcher.local_world_size


def available_bytes(name: DeviceName, *, num_ranks: int) -> int:
    """Memory that one of a machine's ranks may count on: its device's own, or its share of what the machine has."""
    if name == "cuda":
        free, _ = torch.cuda.mem_get_info()
        return free
    return _host_bytes() // num_ranks


def _host_bytes() -> int:
    """Memory to be had without swapping. What files keep cached counts, since the kernel gives it up."""
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:"))
    except (OSError, StopIteration):  # not Linux: all there is
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
