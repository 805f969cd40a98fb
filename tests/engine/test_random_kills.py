"""Kill a rank at a random moment, fifty times: whatever it was doing, everyone learns of it and nothing is left.

``make test-failures``. Moments range over start-up, idleness and every part of a step.
"""

from __future__ import annotations

import os
import random
import signal
import threading
import time

import pytest
from tests import fixtures
from tests.engine.groups import EXIT_S, group_args, is_running, within
from tests.engine.zoo import Zoo, greedy

from outrider.engine.group import EngineGroup
from outrider.engine.launch import make_engine
from outrider.errors import EngineDeadError

pytestmark = pytest.mark.failures


@pytest.mark.parametrize("seed", range(50))
def test_a_rank_killed_at_a_random_moment(seed: int, zoo: Zoo) -> None:
    rng = random.Random(seed)
    shape = rng.choice(({"data_parallel_size": 2}, {"data_parallel_size": 1, "tensor_parallel_size": 2}))
    group = make_engine(group_args(zoo, "cycle", "half", distributed_timeout_seconds=10, **shape))
    assert isinstance(group, EngineGroup)
    killed_at: list[float] = []

    def kill(process_id: int) -> None:
        killed_at.append(time.monotonic())
        os.kill(process_id, rng.choice((signal.SIGKILL, signal.SIGABRT)))

    timer = threading.Timer(rng.random() * 0.5, kill, (rng.choice(group.process_ids),))
    timer.start()
    with pytest.raises(EngineDeadError, match=r"rank \d ended by signal SIG(KILL|ABRT)"):
        serve_for_ever(group, rng)
    noticed_s = time.monotonic() - killed_at[0]
    assert not any(map(is_running, group.process_ids)) or within(
        EXIT_S - noticed_s, lambda: not any(map(is_running, group.process_ids))
    )
    assert noticed_s < EXIT_S
    assert not group.has_unfinished


def serve_for_ever(group: EngineGroup, rng: random.Random) -> None:
    """Bursts of requests with pauses, in which the ranks sleep."""
    number = 0
    while True:
        for _ in range(rng.randrange(1, 6)):
            number += 1
            prompt = fixtures.orbit_prompt(rng.randrange(1, 60))
            group.add_request(
                request_id=str(number), prompt=None, prompt_token_ids=prompt, params=greedy(rng.randrange(1, 90))
            )
        while group.has_unfinished:
            group.step()
        if rng.random() < 0.3:
            group.wait()
