"""Many clients at once, some of which leave: nothing fails, nothing is kept."""

from __future__ import annotations

import asyncio
import os
import random
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import pytest
from tests import fixtures
from tests.server.live import eventually, serve

from outrider.config import EngineArgs
from outrider.engine.async_engine import AsyncEngine
from outrider.engine.setup import build_engine
from outrider.server.config import ServerConfig

CLIENTS = 64
REQUESTS = 500
WARM_UP = 150
KV_BYTES = 2_000_000  # some 1,300 tokens: far from enough for all clients, so that they queue
MAX_GROWTH_BYTES = 48 * 2**20


@dataclass(slots=True)
class Tally:
    statuses: list[int] = field(default_factory=list)
    broken: list[str] = field(default_factory=list)
    left: int = 0


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


async def one_request(http: httpx.AsyncClient, number: int, tally: Tally) -> None:
    rng = random.Random(number)
    prompt = fixtures.orbit_prompt(rng.randint(1, 90), first_generated_index=rng.randint(0, 59))
    greedy = rng.random() < 0.5
    max_tokens, n = rng.randint(1, 40), rng.choice((1, 1, 2))
    body = {
        "prompt": prompt, "max_tokens": max_tokens, "temperature": 0 if greedy else 1, "seed": number,
        "stream": rng.random() < 0.5, "n": n,
    }  # fmt: skip
    if number % 10 == 0:
        tally.left += 1
        async with http.stream("POST", "/v1/completions", json={**body, "max_tokens": 120, "stream": True}) as response:
            tally.statuses.append(response.status_code)
            await anext(response.aiter_raw())
        return
    response = await http.post("/v1/completions", json=body)
    tally.statuses.append(response.status_code)
    if body["stream"]:
        good = response.text.endswith("data: [DONE]\n\n") and '"error"' not in response.text
    else:
        usage = response.json()["usage"]
        good = usage["completion_tokens"] <= max_tokens * n
        expected = fixtures.continuation(prompt, max_tokens)
        if greedy:
            text = "".join(fixtures.CHARACTERS[token_id] for token_id in expected)
            good &= all(choice["text"] == text for choice in response.json()["choices"])
    if not good:
        tally.broken.append(response.text[-300:])


async def run_clients(url: str, numbers: range, tally: Tally) -> None:
    waiting = iter(numbers)  # shared: each client takes the next

    async def client() -> None:
        async with httpx.AsyncClient(base_url=url, timeout=120, verify=False) as http:
            for number in waiting:
                await one_request(http, number, tally)

    await asyncio.gather(*(client() for _ in range(CLIENTS)))


@pytest.mark.slow
def test_soak(tmp_path: Path) -> None:
    target, drafter = fixtures.make_cycle_target(tmp_path / "cycle"), fixtures.make_half_drafter(tmp_path / "half")
    args = EngineArgs(
        model=str(target), draft=str(drafter), max_model_len=256, kv_cache_memory_bytes=KV_BYTES, max_num_seqs=32
    )
    engine = AsyncEngine(build_engine(args), model_name="cycle")
    tally = Tally()
    with serve(engine, config=ServerConfig(port=0, drain_timeout_s=0.0)) as live:
        asyncio.run(run_clients(live.url, range(WARM_UP), tally))
        before = resident_bytes()
        asyncio.run(run_clients(live.url, range(WARM_UP, REQUESTS), tally))
        growth = resident_bytes() - before
        assert eventually(lambda: engine.stats().num_running == engine.stats().num_waiting == 0)
        stats = engine.stats()
        assert eventually(lambda: live.server.state.in_flight == 0)
    assert tally.statuses == [200] * REQUESTS
    assert tally.broken == []
    assert tally.left == REQUESTS // 10
    assert stats.kv_blocks_free == stats.kv_blocks_total
    assert growth < MAX_GROWTH_BYTES, f"{growth / 2**20:.0f} MiB more than after the first {WARM_UP} requests"
    print(f"{REQUESTS} requests, {stats.preemptions_total} preemptions, growth {growth / 2**20:.1f} MiB")
