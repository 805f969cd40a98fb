"""A workload over HTTP: streaming clients of an OpenAI-compatible server, timed where the chunks arrive.

Times count as in ``run``: from sending in a closed loop, from the moment a request was due with ``arrivals_s``.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import httpx
from prometheus_client.parser import text_string_to_metric_families

from outrider.bench.served import Run, Served
from outrider.bench.workload import BenchRequest
from outrider.errors import OutriderError
from outrider.outputs import SpecCounters

_CONNECT_TIMEOUT_S = 10.0
_SCRAPES, _SCRAPE_PAUSE_S = 50, 0.02
_PREFIX = "outrider:spec_decode_num_"


@dataclass(frozen=True, slots=True, kw_only=True)
class HttpTarget:
    """Where the server is. ``base_url`` is its root, without ``/v1``."""

    base_url: str
    api_key: str
    in_this_process: bool

    def client(self) -> httpx.AsyncClient:
        """No limit on connections or on the length of an answer; no proxy in front of this process."""
        return httpx.AsyncClient(
            base_url=self.base_url,
            headers={"Authorization": f"Bearer {self.api_key}"} if self.api_key else {},
            timeout=httpx.Timeout(None, connect=_CONNECT_TIMEOUT_S),
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=None),
            trust_env=not self.in_this_process,
            verify=not self.in_this_process,  # nothing to verify, and loading the certificates takes its time
        )


def run_over_http(
    target: HttpTarget,
    requests: Sequence[BenchRequest],
    *,
    max_concurrency: int,
    arrivals_s: Sequence[float] | None,
    on_served: Callable[[], object],
) -> Run:
    """Raises OutriderError if the server cannot be reached or answers a request with an error."""

    async def main() -> Run:
        async with target.client() as client:
            model = (await _get(client, "/v1/models")).json()["data"][0]["id"]
            before = await _scrape(client)
            slots = asyncio.Semaphore(max_concurrency)
            began = time.perf_counter()

            async def serve(index: int) -> Served:
                due = began
                if arrivals_s is not None:
                    due += arrivals_s[index]
                    await asyncio.sleep(due - time.perf_counter())
                async with slots:
                    start = time.perf_counter() if arrivals_s is None else due
                    served = await _stream(client, model, requests[index], index=index, start=start)
                on_served()
                return served

            served = await _all_or_first_error([serve(index) for index in range(len(requests))])
            elapsed_s = time.perf_counter() - began
            after = await _scrape_all(client, before, num_tokens=sum(each.num_tokens for each in served))
        return Run(served=tuple(served), elapsed_s=elapsed_s, spec=_spec(before, after))

    try:
        return asyncio.run(main())
    except httpx.HTTPError as error:
        raise OutriderError(f"base_url={target.base_url}: {type(error).__name__}: {error}") from error


async def _all_or_first_error(requests: Sequence[Coroutine[Any, Any, Served]]) -> list[Served]:
    """A task group would wrap the error."""
    tasks = [asyncio.create_task(request) for request in requests]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _stream(client: httpx.AsyncClient, model: str, request: BenchRequest, *, index: int, start: float) -> Served:
    path, body = _payload(request, model)
    first_s, num_tokens = 0.0, -1
    async with client.stream("POST", path, json=body) as response:
        if response.status_code != 200:
            text = (await response.aread()).decode(errors="replace")
            raise OutriderError(f"request {index} was answered with status {response.status_code}: {text}")
        async for line in response.aiter_lines():
            if not line.startswith("data:") or line.removeprefix("data:").strip() == "[DONE]":
                continue
            event = json.loads(line.removeprefix("data:"))
            if "error" in event:
                raise OutriderError(f"request {index} failed: {event['error']}")
            if not first_s and any(_has_text(choice) for choice in event["choices"]):
                first_s = time.perf_counter() - start
            if event.get("usage"):
                num_tokens = event["usage"]["completion_tokens"]
    if num_tokens < 0:
        raise OutriderError(f"request {index}: the stream ended without usage, so its tokens cannot be counted")
    end_s = time.perf_counter() - start
    return Served(num_tokens=num_tokens, ttft_s=first_s or end_s, e2e_s=end_s)


def _payload(request: BenchRequest, model: str) -> tuple[str, dict[str, object]]:
    params = request.params
    body: dict[str, object] = {
        "model": model,
        "max_tokens": params.max_tokens,
        "temperature": params.temperature,
        "top_p": params.top_p,
        "seed": params.seed,
        "ignore_eos": params.ignore_eos,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    if request.chat:
        return "/v1/chat/completions", {**body, "messages": [{"role": "user", "content": request.text}]}
    return "/v1/completions", {**body, "prompt": list(request.token_ids) if request.text is None else request.text}


def _has_text(choice: Mapping[str, Any]) -> bool:
    delta: Mapping[str, Any] = choice.get("delta") or choice
    return bool(delta.get("content") or delta.get("text"))


async def _get(client: httpx.AsyncClient, path: str) -> httpx.Response:
    response = await client.get(path)
    response.raise_for_status()
    return response


Counters = dict[tuple[str, str], int]  # by name and position ("" without one)


async def _scrape(client: httpx.AsyncClient) -> Counters:
    """The engine's counters; none of them if the server is another engine."""
    response = await client.get("/metrics")
    found: Counters = {}
    if response.status_code == 200:
        for family in text_string_to_metric_families(response.text):
            for sample in family.samples:
                if sample.name.startswith("outrider:") and sample.name.endswith("_total"):
                    found[sample.name.removesuffix("_total"), sample.labels.get("position", "")] = int(sample.value)
    return found


async def _scrape_all(client: httpx.AsyncClient, before: Counters, *, num_tokens: int) -> Counters:
    """Scrape until the tokens that came back are counted: the engine counts a step after it has sent its tokens."""
    key = ("outrider:generation_tokens", "")
    after = await _scrape(client)
    for _ in range(_SCRAPES):
        if key not in after or after[key] - before.get(key, 0) >= num_tokens:
            break
        await asyncio.sleep(_SCRAPE_PAUSE_S)
        after = await _scrape(client)
    return after


def _spec(before: Counters, after: Counters) -> SpecCounters:
    def gained(name: str, position: str = "") -> int:
        key = (_PREFIX + name, position)
        return after.get(key, 0) - before.get(key, 0)

    depth = sum(name == f"{_PREFIX}draft_tokens_per_pos" for name, _ in after)
    return SpecCounters(
        rounds=gained("drafts"),
        offered=gained("draft_tokens"),
        accepted=gained("accepted_tokens"),
        emitted=gained("emitted_tokens"),
        per_position=tuple(
            (gained("draft_tokens_per_pos", str(i)), gained("accepted_tokens_per_pos", str(i))) for i in range(depth)
        ),
    )
