"""What machine this is, for the record beside figures (no numpy: the processes of peers import this)."""

from __future__ import annotations

import os
import platform
import resource
import sys
from pathlib import Path


def physical_cores() -> int:
    """Cores that this process may use, two hyperthreads of one counted once."""
    if not hasattr(os, "sched_getaffinity"):
        return os.cpu_count() or 1
    siblings = {_siblings(cpu) for cpu in os.sched_getaffinity(0)}
    return len(siblings)


def cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def peak_rss_bytes() -> int:
    """Largest resident set of this process so far.

    From the kernel's status file where there is one: ``getrusage`` counts what the process that started this one held.
    """
    try:
        status = Path("/proc/self/status").read_text(encoding="ascii", errors="replace").splitlines()
    except OSError:
        status = []
    for line in status:
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def _siblings(cpu: int) -> str:
    try:
        return Path(f"/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list").read_text(encoding="ascii")
    except OSError:
        return str(cpu)
