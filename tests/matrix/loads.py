"""Who asks what, of which data-parallel rank, at which step: the loads that the matrix runs on every topology.

Every load mixes greedy and seeded requests. No two requests of a load share a prompt, and none is found in the prefix
cache of another load, so that every prompt is really computed. A load is a script: given the number of data-parallel
ranks it is the same on all of them, and each rank picks its own arrivals.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from tests.engine.zoo import greedy, random_prompt

from outrider import SamplingParams

SEATS = 4  # of a rank; a load with more requests makes some wait
TOKEN_BUDGET = 48  # of a step: four verify windows of eight rows leave 16 tokens for a prefill
MAX_MODEL_LEN = 128
LONG_PROMPT = 100  # several chunks


@dataclass(frozen=True, slots=True, kw_only=True)
class Arrival:
    step: int  # of the engine: the request is there before this step is scheduled
    dp_rank: int
    request_id: str
    prompt: tuple[int, ...]
    params: SamplingParams


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    name: str
    arrivals: tuple[Arrival, ...]

    @property
    def last_step(self) -> int:
        return max(arrival.step for arrival in self.arrivals)

    def at(self, step: int, dp_rank: int) -> list[Arrival]:
        return [arrival for arrival in self.arrivals if (arrival.step, arrival.dp_rank) == (step, dp_rank)]


def ample_loads(dp: int, *, decode_tokens: int = 14) -> tuple[Load, ...]:
    """Those that never run out of KV blocks and make sense for ``dp`` ranks: one can be idle beside others only.

    decode_tokens: of the requests that decode while another prefills; several rounds of a good drafter need more.
    """
    makers: list[Callable[[int], Load]] = [
        busy,
        partial(prefill_while_decoding, decode_tokens=decode_tokens),
        staggered,
    ]
    if dp > 1:
        makers += [one_idle, all_but_one_idle]
    return tuple(make(dp) for make in makers)


def busy(dp: int) -> Load:
    """Every rank has work from the first step, each another number of requests."""
    counts = (2, 3, 1, 4)[:dp]
    return Load(name="busy", arrivals=tuple(_request(1, r, i) for r, count in enumerate(counts) for i in range(count)))


def one_idle(dp: int) -> Load:
    """The last rank never has a request."""
    counts = (3, 2, 1)[: dp - 1]
    return Load(
        name="one-idle", arrivals=tuple(_request(2, r, i) for r, count in enumerate(counts) for i in range(count))
    )


def all_but_one_idle(dp: int) -> Load:
    """The last rank alone has requests."""
    return Load(name="all-but-one-idle", arrivals=tuple(_request(3, dp - 1, i) for i in range(3)))


def prefill_while_decoding(dp: int, *, decode_tokens: int = 14) -> Load:
    """All decode; then a prompt of several chunks comes to rank 0, which keeps decoding, too."""
    early = [_request(4, r, i, max_tokens=decode_tokens + r) for r in range(dp) for i in range(1 + (r + 1) % 2)]
    return Load(name="prefill-while-decoding", arrivals=(*early, _request(4, 0, 9, step=3, length=LONG_PROMPT)))


def staggered(dp: int) -> Load:
    """Requests end at different rounds and new ones start in between; one comes after all have gone idle."""
    counts = (3, 5, 2, 6)[:dp]
    arrivals = [
        _request(5, r, i, step=(r + 3 * i) % 8, max_tokens=2 + (5 * i + 3 * r) % 9)
        for r, count in enumerate(counts)
        for i in range(count)
    ]
    return Load(name="staggered", arrivals=(*arrivals, _request(5, 0, 9, step=40)))


def crowded(dp: int) -> Load:
    """For a pool that cannot hold them: the first rank has to preempt, the second never."""
    counts = (4, 1, 3, 4)[:dp]
    arrivals = [
        _request(6, r, i, length=20 + 3 * i, max_tokens=28) for r, count in enumerate(counts) for i in range(count)
    ]
    return Load(name="crowded", arrivals=tuple(arrivals))


def _request(
    load: int, dp_rank: int, index: int, *, step: int = 0, length: int | None = None, max_tokens: int | None = None
) -> Arrival:
    number = 100 * load + 10 * dp_rank + index
    new_tokens = max_tokens if max_tokens is not None else 4 + (3 * index + 2 * dp_rank) % 7
    if (index + dp_rank) % 2 == 0:
        params = greedy(new_tokens, ignore_eos=True)
    else:
        params = SamplingParams(
            temperature=0.7 + 0.1 * (number % 4),
            top_p=0.9 if number % 3 == 0 else 1.0,
            repetition_penalty=1.1 if number % 5 == 0 else 1.0,
            seed=number,
            max_tokens=new_tokens,
            ignore_eos=True,
        )
    return Arrival(
        step=step,
        dp_rank=dp_rank,
        request_id=f"{dp_rank}.{index}",
        prompt=tuple(random_prompt(length if length is not None else 2 + (7 * number) % 31, seed=number)),
        params=params,
    )
