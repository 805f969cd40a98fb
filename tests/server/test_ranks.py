"""The server over two ranks: the targets' answers to concurrent clients, then the death of a rank."""

from __future__ import annotations

import os
import signal
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import openai
import pytest
from tests import fixtures
from tests.engine.groups import group_args, is_running
from tests.engine.zoo import Zoo
from tests.server.live import TIMEOUT_S, LiveServer, eventually, serve

from outrider.engine.async_engine import AsyncEngine
from outrider.engine.group import EngineGroup
from outrider.engine.launch import make_engine
from outrider.server.config import ServerConfig


def text_of(token_ids: list[int]) -> str:
    return "".join(fixtures.CHARACTERS[token_id] for token_id in token_ids)


def complete(live: LiveServer, index: int) -> str:
    """A client's request, streamed or not; the third kind is a bad one, the fourth leaves early."""
    prompt = fixtures.orbit_prompt(1 + index)
    expected = text_of(fixtures.continuation(prompt, 50))
    create = live.openai().completions.create
    if index % 4 == 2:
        with pytest.raises(openai.BadRequestError):
            create(model="cycle", prompt=[99], max_tokens=50, temperature=0)
    elif index % 4 == 3:
        with create(model="cycle", prompt=prompt, max_tokens=900, temperature=0, stream=True) as stream:
            next(iter(stream))
    elif index % 4 == 1:
        chunks = create(model="cycle", prompt=prompt, max_tokens=50, temperature=0, stream=True)
        assert "".join(chunk.choices[0].text for chunk in chunks) == expected
    else:
        answer = create(model="cycle", prompt=prompt, max_tokens=50, temperature=0, n=2)
        assert [choice.text for choice in answer.choices] == [expected] * 2
    return "done"


def test_clients_of_two_ranks_and_the_end_of_one(tmp_path: Path) -> None:
    group = make_engine(group_args(Zoo(tmp_path), "cycle", "half", max_num_seqs=8))
    assert isinstance(group, EngineGroup)
    engine = AsyncEngine(group, model_name="cycle")
    with serve(engine, config=ServerConfig(port=0, drain_timeout_s=0.0)) as live:
        with ThreadPoolExecutor(12) as pool:
            assert list(pool.map(lambda index: complete(live, index), range(24))) == ["done"] * 24
        assert eventually(lambda: engine.stats().kv_blocks_free == engine.stats().kv_blocks_total)
        assert all(stats.generation_tokens_total > 50 for stats in engine.rank_stats()), "both had work"
        streams = [
            live.openai().completions.create(model="cycle", prompt=[1], max_tokens=1000, temperature=0, stream=True)
            for _ in range(4)
        ]
        os.kill(group.process_ids[1], signal.SIGKILL)
        for stream in streams:
            with pytest.raises(openai.APIError) as caught:
                list(stream)
            assert caught.value.code == "engine_dead"
        assert live.finished.wait(TIMEOUT_S)
        assert live.report is not None
        assert live.report.engine_died
    assert not any(map(is_running, group.process_ids))
