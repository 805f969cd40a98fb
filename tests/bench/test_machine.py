"""Where this process stands in memory, and what machine it is on."""

from __future__ import annotations

import os
import sys

from outrider.bench.machine import cpu_name, peak_rss_bytes, physical_cores


def test_peak_memory_is_in_bytes_and_never_falls() -> None:
    before = peak_rss_bytes()
    block = bytearray(64 * 2**20)
    block[::4096] = b"x" * len(block[::4096])  # touch every page
    grown = peak_rss_bytes()
    assert before > 10 * 2**20  # an interpreter takes more, in whatever unit
    assert grown >= max(before, sys.getsizeof(block))
    del block
    # The kernel counts pages per processor and sums them up now and then: two readings may differ by some of them.
    assert peak_rss_bytes() >= grown - 2**20


def test_the_machine_has_a_name_and_cores() -> None:
    assert cpu_name()
    assert 1 <= physical_cores() <= (os.cpu_count() or 1)
