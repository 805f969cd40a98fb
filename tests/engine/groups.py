"""Engines of several ranks for tests: real processes over the zoo's models."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from tests.engine.zoo import SMALL_POOL, Zoo

from outrider import LLM
from outrider.config import EngineArgs
from outrider.engine.group import EngineGroup
from outrider.engine.launch import make_engine
from outrider.engine.messages import BuildEngine
from outrider.engine.setup import build_engine

EXIT_S = 10.0  # within which every process of a group that fails has ended


def group_args(zoo: Zoo, target: str, drafter: str = "none", **changes: Any) -> EngineArgs:
    draft = drafter if drafter == "none" else str(zoo.path(drafter))
    args: dict[str, Any] = {
        "kv_cache_memory_bytes": SMALL_POOL,
        "quantization": zoo.quantization,
        "data_parallel_size": 2,
        "draft_self_test": False,
    }
    return EngineArgs(model=str(zoo.path(target)), draft=draft, **{**args, **changes})


@contextmanager
def running_group(args: EngineArgs, *, build: BuildEngine = build_engine) -> Iterator[LLM]:
    """An ``LLM`` over ranks; none of their processes is left afterwards."""
    engine = make_engine(args, build=build)
    assert isinstance(engine, EngineGroup)
    with LLM.from_core(engine) as llm:
        yield llm
    assert not any(map(is_running, engine.process_ids))


def group_of(llm: LLM) -> EngineGroup:
    engine = llm.core
    assert isinstance(engine, EngineGroup)
    return engine


def is_running(process_id: int) -> bool:
    """Whether there is such a process; a dead child that nobody has waited for counts."""
    try:
        os.kill(process_id, 0)
    except ProcessLookupError:
        return False
    return True


def within(seconds: float, condition: Callable[[], bool]) -> bool:
    """Whether ``condition`` comes true in time."""
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True
