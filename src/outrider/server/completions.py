"""POST /v1/completions and POST /v1/chat/completions: check, encode, run, answer whole or in a stream."""

from __future__ import annotations

import time
import uuid
from collections.abc import AsyncGenerator, Callable, Coroutine
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

from fastapi import Request
from fastapi.responses import JSONResponse
from starlette.responses import Response

from outrider.outputs import RequestOutput
from outrider.sampling_params import SamplingParams
from outrider.server.generation import ClientDisconnectedError, run_prompts, stream_prompts, until_disconnect
from outrider.server.params import chat_params, completion_params
from outrider.server.prompts import Prompt
from outrider.server.protocol import ChatCompletionRequest, CompletionRequest, GenerationRequest
from outrider.server.responses import (
    DeltaTracker,
    Header,
    Json,
    chat_choice,
    chat_chunk_choice,
    chat_role_choice,
    completion_choice,
    usage,
)
from outrider.server.state import ServerState
from outrider.server.streaming import EventStreamResponse
from outrider.server.validation import parse_request, read_body

# Nobody reads it: the connection is gone. Proxies log this status for a request that its client closed.
CLIENT_CLOSED_REQUEST = 499


@dataclass(frozen=True, slots=True, kw_only=True)
class _Job:
    """A checked request, ready to run."""

    header: Header
    prompts: list[Prompt]
    params: SamplingParams
    include_usage: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class _Style:
    """How an endpoint words its answers."""

    whole: str  # the "object" of a whole answer
    chunk: str  # and of a streamed part
    choice: Callable[..., Json]  # (index=, delta=)
    chunk_choice: Callable[..., Json]
    announces_role: bool


COMPLETION = _Style(
    whole="text_completion",
    chunk="text_completion",
    choice=completion_choice,
    chunk_choice=completion_choice,
    announces_role=False,
)
CHAT = _Style(
    whole="chat.completion",
    chunk="chat.completion.chunk",
    choice=chat_choice,
    chunk_choice=chat_chunk_choice,
    announces_role=True,
)


async def create_completion(state: ServerState, request: Request) -> Response:
    body = parse_request(await _body(state, request), CompletionRequest)
    state.check_model(body.model)
    params = completion_params(body, vocab_size=state.engine.vocab_size)
    prompts = await state.encoder.completion(body.prompt, n=params.n)
    return await _answer(state, request, body, prompts=prompts, params=params, prefix="cmpl", style=COMPLETION)


async def create_chat_completion(state: ServerState, request: Request) -> Response:
    body = parse_request(await _body(state, request), ChatCompletionRequest)
    state.check_model(body.model)
    params = chat_params(body, vocab_size=state.engine.vocab_size)
    prompts = await state.encoder.chat(body.messages)
    return await _answer(state, request, body, prompts=prompts, params=params, prefix="chatcmpl", style=CHAT)


async def _body(state: ServerState, request: Request) -> bytes:
    return await read_body(request, max_bytes=state.config.max_body_bytes, timeout_s=state.config.body_timeout_s)


async def _answer(
    state: ServerState,
    request: Request,
    body: GenerationRequest,
    *,
    prompts: list[Prompt],
    params: SamplingParams,
    prefix: str,
    style: _Style,
) -> Response:
    job = _Job(
        header=Header(id=f"{prefix}-{uuid.uuid4().hex}", created=int(time.time()), model=state.model_name),
        prompts=prompts,
        params=params,
        include_usage=body.include_usage,
    )
    if body.stream:
        return EventStreamResponse(_events(state, job, style))
    work: Coroutine[Any, Any, Json] = _whole(state, job, style)
    try:
        return JSONResponse(await until_disconnect(request.receive, work))
    except ClientDisconnectedError:
        return Response(status_code=CLIENT_CLOSED_REQUEST)


async def _whole(state: ServerState, job: _Job, style: _Style) -> Json:
    with state.admit():
        outputs = await run_prompts(state, request_id=job.header.id, prompts=job.prompts, params=job.params)
    choices = []
    for prompt_index, output in enumerate(outputs):
        for completion in output.outputs:
            delta = DeltaTracker().advance(completion)
            assert delta is not None, "a finished sequence always has something to tell"
            choices.append(style.choice(index=prompt_index * job.params.n + completion.index, delta=delta))
    return {**job.header.wrap(style.whole, choices), "usage": usage(outputs)}


async def _events(state: ServerState, job: _Job, style: _Style) -> AsyncGenerator[Json, None]:
    """The answer's chunks. The first comes with the first snapshot, so that a refusal still has its status."""
    trackers: dict[int, DeltaTracker] = {}
    last: dict[int, RequestOutput] = {}

    def chunk(choice: Json) -> Json:
        extra: Json = {"usage": None} if job.include_usage else {}
        return {**job.header.wrap(style.chunk, [choice]), **extra}

    with state.admit():
        stream = stream_prompts(state, request_id=job.header.id, prompts=job.prompts, params=job.params)
        async with aclosing(stream):
            async for prompt_index, output in stream:
                last[prompt_index] = output
                for completion in output.outputs:
                    index = prompt_index * job.params.n + completion.index
                    if index not in trackers:
                        trackers[index] = DeltaTracker()
                        if style.announces_role:
                            yield chunk(chat_role_choice(index=index))
                    delta = trackers[index].advance(completion)
                    if delta is not None:
                        yield chunk(style.chunk_choice(index=index, delta=delta))
        if job.include_usage:
            outputs = [last[index] for index in range(len(job.prompts))]
            yield {**job.header.wrap(style.chunk, []), "usage": usage(outputs)}
