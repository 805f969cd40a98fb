"""Runs a request's prompts on the engine: one merged stream of snapshots, or the final ones.

Every prompt is a request of its own to the engine, and they run together. Leaving the stream early, for whatever
reason, closes every engine generator, which aborts what has not finished.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, MutableMapping, Sequence
from contextlib import aclosing
from typing import Any, TypeVar

from outrider.outputs import RequestOutput
from outrider.sampling_params import SamplingParams
from outrider.server.errors import ApiError, unavailable
from outrider.server.prompts import Prompt
from outrider.server.state import ServerState

T = TypeVar("T")
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]


class ClientDisconnectedError(Exception):
    """The client has gone; there is nobody to answer."""


async def stream_prompts(
    state: ServerState, *, request_id: str, prompts: Sequence[Prompt], params: SamplingParams
) -> AsyncGenerator[tuple[int, RequestOutput], None]:
    """``(index of the prompt, snapshot)`` as they come, until every prompt has finished."""
    streams = [
        _stream_one(state, request_id=f"{request_id}-{index}", prompt=prompt, params=params)
        for index, prompt in enumerate(prompts)
    ]
    if len(streams) == 1:
        async with aclosing(streams[0]) as stream:
            async for output in stream:
                yield 0, output
        return
    async with aclosing(_merge(streams)) as merged:
        async for item in merged:
            yield item


async def run_prompts(
    state: ServerState, *, request_id: str, prompts: Sequence[Prompt], params: SamplingParams
) -> list[RequestOutput]:
    """The last snapshot of each prompt, in the prompts' order."""
    last: dict[int, RequestOutput] = {}
    async with aclosing(stream_prompts(state, request_id=request_id, prompts=prompts, params=params)) as stream:
        async for index, output in stream:
            last[index] = output
    return [last[index] for index in range(len(prompts))]


async def _stream_one(
    state: ServerState, *, request_id: str, prompt: Prompt, params: SamplingParams
) -> AsyncGenerator[RequestOutput, None]:
    started = finished = False
    engine_stream = state.engine.generate(
        prompt=prompt.text, prompt_token_ids=prompt.token_ids, params=params, request_id=request_id
    )
    async with aclosing(engine_stream) as snapshots:
        async for output in snapshots:
            if not started and any(completion.token_ids for completion in output.outputs):
                started = True
                state.metrics.first_token(output)
            _raise_if_failed(output)
            finished = output.finished
            if finished:
                state.metrics.finished(output)
            yield output
    if not finished:
        raise unavailable("the engine ended the request before it had finished", code="aborted")


def _raise_if_failed(output: RequestOutput) -> None:
    for completion in output.outputs:
        if completion.finish_reason == "error":
            raise ApiError(
                status=500,
                message=f"the request failed: {completion.error or 'no reason given'}",
                error_type="server_error",
                code="request_failed",
            )
        if completion.finish_reason == "abort":
            raise unavailable("the request was aborted", code="aborted")


async def _merge(
    streams: Sequence[AsyncGenerator[RequestOutput, None]],
) -> AsyncGenerator[tuple[int, RequestOutput], None]:
    """Interleave. The first failure ends all; the queue is bounded, so a slow reader holds the producers back."""
    queue: asyncio.Queue[tuple[int, RequestOutput] | Exception | None] = asyncio.Queue(maxsize=len(streams))

    async def pump(index: int, stream: AsyncGenerator[RequestOutput, None]) -> None:
        try:
            async with aclosing(stream):
                async for output in stream:
                    await queue.put((index, output))
            await queue.put(None)
        except Exception as error:
            await queue.put(error)

    tasks = [asyncio.create_task(pump(index, stream)) for index, stream in enumerate(streams)]
    try:
        running = len(tasks)
        while running:
            item = await queue.get()
            if item is None:
                running -= 1
            elif isinstance(item, Exception):
                raise item
            else:
                yield item
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def until_disconnect(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """Await ``work``, cancelled as soon as the client is gone. The request's body must have been read."""

    async def client_gone() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass

    worker = asyncio.create_task(work)
    watcher = asyncio.create_task(client_gone())
    try:
        await asyncio.wait((worker, watcher), return_when=asyncio.FIRST_COMPLETED)
        if worker.done():
            return worker.result()
        raise ClientDisconnectedError
    finally:
        for task in (worker, watcher):
            task.cancel()
        await asyncio.gather(worker, watcher, return_exceptions=True)
