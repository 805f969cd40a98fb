"""The asynchronous engine: order of snapshots, cancellation, failure and shutdown, with a real core on its thread."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager

import pytest
from tests import fixtures
from tests.engine.failing import core_failing_at_step
from tests.engine.zoo import Zoo, greedy, tokens

from outrider import SamplingParams
from outrider.engine.async_engine import AsyncEngine
from outrider.engine.engine import Engine
from outrider.errors import EngineDeadError, InvalidRequestError, QueueFullError
from outrider.outputs import RequestOutput

PROMPT = fixtures.orbit_prompt(5)


def submit(
    engine: AsyncEngine, request_id: str, params: SamplingParams, prompt: Sequence[int] = PROMPT
) -> AsyncGenerator[RequestOutput, None]:
    return engine.generate(prompt=None, prompt_token_ids=prompt, params=params, request_id=request_id)


async def read(stream: AsyncIterator[RequestOutput]) -> list[RequestOutput]:
    return [output async for output in stream]


@asynccontextmanager
async def running(core: Engine) -> AsyncIterator[AsyncEngine]:
    engine = AsyncEngine(core, model_name="cycle")
    try:
        yield engine
    finally:
        await engine.shutdown(0.0)


async def settle(condition: Callable[[], bool]) -> None:
    """Wait for the engine's thread, a minute at most."""
    for _ in range(3000):
        if condition():
            return
        await asyncio.sleep(0.02)
    raise AssertionError("the engine did not get there")


def run(scenario: Callable[[], Awaitable[None]]) -> None:
    async def limited() -> None:
        await asyncio.wait_for(scenario(), timeout=120)

    asyncio.run(limited())


def test_snapshots_grow_and_the_last_is_finished(zoo: Zoo) -> None:
    async def scenario() -> None:
        async with running(zoo.llm("cycle", "perfect", 3).core) as engine:
            streams = [read(submit(engine, f"r{i}", greedy(20 + i))) for i in range(3)]
            for i, snapshots in enumerate(await asyncio.gather(*streams)):
                lengths = [len(tokens(snapshot)) for snapshot in snapshots]
                assert lengths == sorted(set(lengths)), "every snapshot has more"
                assert [snapshot.finished for snapshot in snapshots] == [False] * (len(snapshots) - 1) + [True]
                assert tokens(snapshots[-1]) == fixtures.continuation(PROMPT, 20 + i)
                for snapshot in snapshots:
                    assert tokens(snapshots[-1])[: len(tokens(snapshot))] == tokens(snapshot)
            assert engine.stats().requests_finished == {"length": 3}
            assert engine.healthy
            assert (engine.vocab_size, engine.max_model_len, engine.model_name) == (64, 1024, "cycle")

    run(scenario)


def test_leaving_the_loop_aborts_the_request(zoo: Zoo) -> None:
    async def scenario() -> None:
        async with running(zoo.llm("cycle").core) as engine:
            stream = submit(engine, "a", greedy(900))
            async for snapshot in stream:
                if len(tokens(snapshot)) >= 2:
                    break
            await stream.aclose()
            task = asyncio.create_task(read(submit(engine, "b", greedy(900))))
            await settle(lambda: engine.stats().generation_tokens_total > 8)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            await settle(lambda: engine.stats().requests_finished.get("abort") == 2)
            assert engine.stats().kv_blocks_free == engine.stats().kv_blocks_total
            again = await read(submit(engine, "a", greedy(3)))  # its id is free again
            assert tokens(again[-1]) == fixtures.continuation(PROMPT, 3)

    run(scenario)


def test_abort_by_id_answers_the_reader(zoo: Zoo) -> None:
    async def scenario() -> None:
        async with running(zoo.llm("cycle").core) as engine:
            task = asyncio.create_task(read(submit(engine, "a", greedy(900))))
            await settle(lambda: engine.stats().generation_tokens_total > 2)
            await engine.abort("unknown")
            await engine.abort("a")
            last = (await task)[-1]
            assert last.finished
            assert last.outputs[0].finish_reason == "abort"
            assert tokens(last) == fixtures.continuation(PROMPT, len(tokens(last)))

    run(scenario)


def test_a_refused_request_harms_no_other(zoo: Zoo) -> None:
    async def scenario() -> None:
        async with running(zoo.llm("cycle", "perfect", 7).core) as engine:
            good = asyncio.create_task(read(submit(engine, "good", greedy(60))))
            with pytest.raises(InvalidRequestError, match="0 tokens"):
                await read(submit(engine, "empty", greedy(3), prompt=[]))
            with pytest.raises(InvalidRequestError, match="token id 64"):
                await read(submit(engine, "beyond", greedy(3), prompt=[64]))
            with pytest.raises(InvalidRequestError, match="cannot be taken: TypeError"):
                await read(submit(engine, "text", greedy(3), prompt=["a"]))  # type: ignore[list-item]
            assert tokens((await good)[-1]) == fixtures.continuation(PROMPT, 60)
            assert engine.healthy

    run(scenario)


def test_a_duplicate_id_is_refused_and_its_owner_goes_on(zoo: Zoo) -> None:
    async def scenario() -> None:
        async with running(zoo.llm("cycle").core) as engine:
            owner = asyncio.create_task(read(submit(engine, "a", greedy(30))))
            await settle(lambda: engine.stats().num_running == 1)
            with pytest.raises(InvalidRequestError, match="'a' is in use"):
                await read(submit(engine, "a", greedy(30)))
            assert tokens((await owner)[-1]) == fixtures.continuation(PROMPT, 30)

    run(scenario)


def test_a_dead_engine_answers_everybody(zoo: Zoo, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("outrider.engine.setup.EngineCore", core_failing_at_step(3))

    async def scenario() -> None:
        async with running(zoo.llm("cycle", "perfect", 3).core) as engine:
            results = await asyncio.gather(
                *(read(submit(engine, f"r{i}", greedy(90))) for i in range(3)), return_exceptions=True
            )
            for result in results:
                assert isinstance(result, EngineDeadError)
                assert "RuntimeError: the drafter broke" in str(result)
            assert not engine.healthy
            with pytest.raises(EngineDeadError):
                await read(submit(engine, "late", greedy(5)))
            await engine.abort("r0")

    run(scenario)


def test_shutdown_finishes_what_runs_and_takes_nothing_new(zoo: Zoo) -> None:
    async def scenario() -> None:
        engine = AsyncEngine(zoo.llm("cycle", "perfect", 3).core, model_name="cycle")
        reader = asyncio.create_task(read(submit(engine, "a", greedy(60))))
        await settle(lambda: engine.stats().generation_tokens_total > 0)
        closing = asyncio.create_task(engine.shutdown(60.0))
        await asyncio.sleep(0)
        with pytest.raises(QueueFullError, match="shutting down"):
            await read(submit(engine, "b", greedy(5)))
        assert tokens((await reader)[-1]) == fixtures.continuation(PROMPT, 60)
        await closing

    run(scenario)


def test_shutdown_aborts_what_does_not_finish_in_time(zoo: Zoo) -> None:
    async def scenario() -> None:
        engine = AsyncEngine(zoo.llm("cycle").core, model_name="cycle")
        reader = asyncio.create_task(read(submit(engine, "a", greedy(900))))
        await settle(lambda: engine.stats().generation_tokens_total > 0)
        await engine.shutdown(0.05)
        last = (await reader)[-1]
        assert last.outputs[0].finish_reason == "abort"
        assert engine.stats().kv_blocks_free <= engine.stats().kv_blocks_total

    run(scenario)


def test_shutdown_of_an_idle_engine_returns(zoo: Zoo) -> None:
    async def scenario() -> None:
        await AsyncEngine(zoo.llm("cycle").core, model_name="cycle").shutdown(30.0)

    run(scenario)
