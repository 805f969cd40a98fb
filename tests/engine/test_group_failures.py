"""A rank that dies, raises, hangs or cannot start ends the group: errors that name it, and no process left."""

from __future__ import annotations

import functools
import os
import signal
import threading
import time

import pytest
from tests import fixtures
from tests.engine.failing import build_that_fails, build_with_failing_rank
from tests.engine.groups import EXIT_S, group_args, group_of, is_running, running_group, within
from tests.engine.zoo import Zoo, generate, greedy

from outrider import LLM
from outrider.engine.launch import make_engine
from outrider.errors import CheckpointError, EngineDeadError

PROMPTS = [fixtures.orbit_prompt(length) for length in (4, 5, 6, 7)]


def generate_for_ever(llm: LLM) -> None:
    while True:
        generate(llm, PROMPTS, greedy(900))


def generate_until_death(llm: LLM, *, signals: dict[int, signal.Signals], after_s: float) -> str:
    """Generate while ranks are sent ``signals``; the error's text. Every process has ended within the limit."""
    group = group_of(llm)
    hit_at: list[float] = []

    def hit() -> None:
        hit_at.append(time.monotonic())
        for rank, number in signals.items():
            os.kill(group.process_ids[rank], number)

    timer = threading.Timer(after_s, hit)
    timer.start()
    try:
        with pytest.raises(EngineDeadError) as caught:
            generate_for_ever(llm)
    finally:
        timer.join()
    assert within(EXIT_S, lambda: not any(map(is_running, group.process_ids)))
    with pytest.raises(EngineDeadError):
        generate(llm, PROMPTS, greedy(4))
    return str(caught.value)


@pytest.mark.parametrize("rank", [0, 1])
def test_a_killed_rank_ends_the_group(rank: int, zoo: Zoo) -> None:
    with running_group(group_args(zoo, "cycle")) as llm:
        began = time.monotonic()
        text = generate_until_death(llm, signals={rank: signal.SIGKILL}, after_s=0.3)
        assert time.monotonic() - began < 0.3 + EXIT_S
        assert f"rank {rank} ended by signal SIGKILL" in text


def test_a_rank_that_raises_ends_the_group(zoo: Zoo) -> None:
    build = functools.partial(build_with_failing_rank, rank=1, fuse=4)
    with running_group(group_args(zoo, "cycle", "half"), build=build) as llm:
        text = generate_until_death(llm, signals={}, after_s=0.0)
        assert "rank 1 ended by RuntimeError: the drafter broke" in text


def test_a_rank_that_hangs_is_found_by_the_timeout(zoo: Zoo) -> None:
    with running_group(group_args(zoo, "cycle", distributed_timeout_seconds=3)) as llm:
        text = generate_until_death(llm, signals={1: signal.SIGSTOP}, after_s=0.3)
        assert "rank 1 does not answer" in text


def test_a_rank_that_cannot_start_says_why(zoo: Zoo) -> None:
    with pytest.raises(CheckpointError, match="no tensor 'lm_head'"):
        make_engine(group_args(zoo, "cycle"), build=functools.partial(build_that_fails, rank=1))
