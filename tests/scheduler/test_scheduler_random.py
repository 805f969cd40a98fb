"""Random adds, aborts, steps and accepted lengths under a pool too small for them, against a model of the memory.

The model keeps, for every slot, the whole token history of what was last written there: the tokens at positions
0..i for the entry of position i. Each row that runs checks the histories of all positions it would attend to. The next
token is a fixed function of the history, so every request has one right output whatever happens to it on the way.
"""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass, field
from typing import Literal

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from outrider.errors import InvalidRequestError, QueueFullError
from outrider.kv_cache.manager import KVCacheManager
from outrider.outputs import FinishReason
from outrider.sampling_params import SamplingParams
from outrider.scheduler.output import DecodeRow, PrefillChunk, SchedulerOutput
from outrider.scheduler.request import Request, RequestStatus
from outrider.scheduler.scheduler import Scheduler, SchedulerConfig

Family = Literal["all", "prefill", "decode"]
REJECTED = -1  # stands for a drafted token that is not the right one
VOCABULARY = 2  # so small that prefixes meet often


def next_token(history: tuple[int, ...]) -> int:
    return (sum(history[-3:]) + len(history) // 2) % VOCABULARY


def solo(prompt: tuple[int, ...], count: int) -> list[int]:
    tokens = prompt
    for _ in range(count):
        tokens = (*tokens, next_token(tokens))
    return list(tokens[len(prompt) :])


@dataclass
class Simulation:
    """A scheduler and the memory it schedules for."""

    scheduler: Scheduler
    slots: dict[int, tuple[int, ...]] = field(default_factory=dict)
    requests: list[Request] = field(default_factory=list)  # all that were accepted
    written: set[int] = field(default_factory=set)  # slots written in the current step
    num_steps: int = 0

    def slot(self, request: Request, position: int) -> int:
        size = self.scheduler.kv_cache.kv_block_size
        return request.block_ids[position // size] * size + position % size

    def tokens(self, request: Request) -> tuple[int, ...]:
        return (*request.prompt_token_ids, *request.output_token_ids)

    def add(self, prompt: tuple[int, ...], *, max_tokens: int | None) -> None:
        request = Request.create(
            request_id=str(len(self.requests)),
            prompt_token_ids=prompt,
            params=SamplingParams(max_tokens=max_tokens),
            arrival_time=0.0,
            max_model_len=self.scheduler.config.max_model_len,
        )
        before = (self.scheduler.num_waiting, self.scheduler.kv_cache.num_free)
        try:
            self.scheduler.add(request)
        except (InvalidRequestError, QueueFullError):
            assert self.scheduler.get(request.request_id) is None
            assert before == (self.scheduler.num_waiting, self.scheduler.kv_cache.num_free)
        else:
            self.requests.append(request)

    def check_history(self, request: Request, stop: int) -> None:
        """What the row attends to in positions 0..stop-1 is what the request has there."""
        tokens = self.tokens(request)
        for position in range(stop):
            assert self.slots[self.slot(request, position)] == tokens[: position + 1], (request.request_id, position)

    def write(self, request: Request, position: int, history: tuple[int, ...]) -> None:
        slot = self.slot(request, position)
        block_id = slot // self.scheduler.kv_cache.kv_block_size
        assert self.scheduler.kv_cache.ref_count(block_id) == 1, "write into a shared block"
        assert slot not in self.written, "two rows write one slot"
        self.written.add(slot)
        self.slots[slot] = history

    def run_prefill(self, chunk: PrefillChunk) -> None:
        request = chunk.request
        tokens = self.tokens(request)
        assert chunk.start == request.num_computed_tokens
        self.check_history(request, chunk.start)
        for position in range(chunk.start, chunk.start + chunk.length):
            self.write(request, position, tokens[: position + 1])
        emitted = (next_token(tokens),) if chunk.samples else ()
        assert chunk.samples == (chunk.start + chunk.length == len(request.prompt_token_ids) == len(tokens))
        full = len(tokens) + len(emitted) == request.max_total_tokens
        self.scheduler.commit(
            request,
            num_new_computed=chunk.length,
            new_token_ids=emitted,
            finish_reason="length" if full else None,
        )

    def run_decode(self, row: DecodeRow, *, accept: int, stop: bool) -> None:
        request, width = row.request, row.verify_width
        tokens = self.tokens(request)
        p = len(tokens) - 1
        assert request.is_decoding
        config = self.scheduler.config
        assert width == min(1 + self.scheduler.num_speculative_tokens, config.max_model_len - p)
        assert p + width <= len(request.block_ids) * self.scheduler.kv_cache.kv_block_size
        self.check_history(request, p)
        right = (*tokens, *solo(tokens, width))
        num_accepted = min(accept, width - 1)
        for j in range(width):
            history = right[: p + 1 + j] if j <= num_accepted else (*right[: p + 1 + num_accepted], REJECTED)
            self.write(request, p + j, history)
        count = min(num_accepted + 1, request.max_total_tokens - len(tokens))
        full = len(tokens) + count == request.max_total_tokens
        reason: FinishReason | None = "stop" if stop else "length" if full else None
        self.scheduler.commit(
            request,
            num_new_computed=count,
            new_token_ids=right[p + 1 : p + 1 + count],
            finish_reason=reason,
        )

    def step(self, *, accepts: list[int], stops: bool, family: Family) -> SchedulerOutput:
        """Schedule and run; of a family other than "all" only these rows are run and committed."""
        output = self.scheduler.schedule()
        self.num_steps += 1
        assert output.is_empty == (not self.scheduler.has_unfinished)
        assert output.num_batched_tokens <= self.scheduler.config.max_num_batched_tokens
        rows: list[PrefillChunk | DecodeRow] = [*output.prefills, *output.decodes]
        requests = [row.request for row in rows]
        assert len(set(requests)) == len(requests)
        assert all(request.status is RequestStatus.RUNNING for request in requests)
        assert all(request.status is RequestStatus.PREEMPTED for request in output.preempted)
        prefill_ages = [chunk.request.arrival_index for chunk in output.prefills]
        decode_ages = [row.request.arrival_index for row in output.decodes]
        assert prefill_ages == sorted(prefill_ages)
        assert decode_ages == sorted(decode_ages)
        self.written.clear()
        if family != "decode":
            for chunk in output.prefills:
                self.run_prefill(chunk)
        if family != "prefill":
            for i, row in enumerate(output.decodes):
                self.run_decode(row, accept=accepts[i % len(accepts)], stop=stops and i == 0)
        return output

    def check(self) -> None:
        kv_cache = self.scheduler.kv_cache
        held: Counter[int] = Counter()
        for request in self.requests:
            if request.status is RequestStatus.RUNNING:
                assert len(set(request.block_ids)) == len(request.block_ids)
                assert request.num_computed_tokens <= len(request.block_ids) * kv_cache.kv_block_size
                held.update(request.block_ids)
            else:
                assert request.block_ids == []
            if request.is_finished:
                assert request.finish_reason is not None
            assert request.num_tokens <= request.max_total_tokens <= self.scheduler.config.max_model_len
            assert request.output_token_ids == solo(request.prompt_token_ids, len(request.output_token_ids))
        for block_id in range(kv_cache.num_total):
            assert kv_cache.ref_count(block_id) == held[block_id]
        assert kv_cache.num_free == kv_cache.num_total - len(held)
        assert kv_cache.num_cached <= kv_cache.num_total
        assert self.scheduler.num_running <= self.scheduler.config.max_num_seqs
        statuses = Counter(request.status for request in self.requests)
        assert self.scheduler.num_running == statuses[RequestStatus.RUNNING]
        assert self.scheduler.num_waiting == statuses[RequestStatus.WAITING] + statuses[RequestStatus.PREEMPTED]
        assert sum(self.scheduler.num_finished.values()) == statuses[RequestStatus.FINISHED]

    def drain(self) -> None:
        """Every request ends within a bounded number of steps, and all memory is free again."""
        limit = self.num_steps + 50 + 2 * sum(r.max_total_tokens for r in self.requests if not r.is_finished)
        while self.scheduler.has_unfinished:
            self.step(accepts=[0], stops=False, family="all")
            self.check()
            assert self.num_steps < limit, "requests do not end"
        assert self.scheduler.kv_cache.num_free == self.scheduler.kv_cache.num_total
        assert self.scheduler.kv_cache.reset_prefix_cache()
        assert self.scheduler.kv_cache.num_cached == 0


def make_simulation(
    *,
    kv_block_size: int,
    num_blocks: int,
    num_speculative_tokens: int,
    extra_budget: int,
    max_num_seqs: int,
    max_model_len: int,
    max_waiting: int,
    enable_chunked_prefill: bool,
    enable_prefix_caching: bool,
) -> Simulation:
    least = 1 + num_speculative_tokens if enable_chunked_prefill else max(1 + num_speculative_tokens, max_model_len)
    config = SchedulerConfig(
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=least + extra_budget,
        enable_chunked_prefill=enable_chunked_prefill,
        max_model_len=max_model_len,
        max_waiting=max_waiting,
    )
    kv_cache = KVCacheManager(
        num_blocks=num_blocks, kv_block_size=kv_block_size, enable_prefix_caching=enable_prefix_caching
    )
    return Simulation(Scheduler(config, kv_cache, num_speculative_tokens=num_speculative_tokens))


class SchedulerMachine(RuleBasedStateMachine):
    simulation: Simulation

    @initialize(
        kv_block_size=st.integers(1, 4),
        num_blocks=st.integers(3, 14),
        num_speculative_tokens=st.integers(0, 5),
        extra_budget=st.integers(0, 12),
        max_num_seqs=st.integers(1, 5),
        max_model_len=st.integers(4, 30),
        enable_chunked_prefill=st.booleans(),
        enable_prefix_caching=st.sampled_from([True, True, True, False]),
    )
    def start(
        self,
        kv_block_size: int,
        num_blocks: int,
        num_speculative_tokens: int,
        extra_budget: int,
        max_num_seqs: int,
        max_model_len: int,
        enable_chunked_prefill: bool,
        enable_prefix_caching: bool,
    ) -> None:
        self.simulation = make_simulation(
            kv_block_size=kv_block_size,
            num_blocks=num_blocks,
            num_speculative_tokens=num_speculative_tokens,
            extra_budget=extra_budget,
            max_num_seqs=max_num_seqs,
            max_model_len=max_model_len,
            max_waiting=6,
            enable_chunked_prefill=enable_chunked_prefill,
            enable_prefix_caching=enable_prefix_caching,
        )

    @rule(
        prompt=st.lists(st.integers(0, VOCABULARY - 1), min_size=1, max_size=12),
        max_tokens=st.one_of(st.none(), st.integers(1, 15)),
    )
    def add(self, prompt: list[int], max_tokens: int | None) -> None:
        self.simulation.add(tuple(prompt), max_tokens=max_tokens)

    @precondition(lambda self: self.simulation.requests)
    @rule(data=st.data())
    def add_with_a_known_prefix(self, data: st.DataObject) -> None:
        """A next turn: all that some request had so far, and one token."""
        earlier = data.draw(st.sampled_from(self.simulation.requests))
        self.simulation.add((*self.simulation.tokens(earlier), 0), max_tokens=data.draw(st.integers(1, 6)))

    @precondition(lambda self: self.simulation.scheduler.has_unfinished)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        unfinished = [request for request in self.simulation.requests if not request.is_finished]
        request = data.draw(st.sampled_from(unfinished))
        assert self.simulation.scheduler.abort(request.request_id) is request
        assert request.finish_reason == "abort"

    @rule(
        accepts=st.lists(st.integers(0, 5), min_size=1, max_size=3),
        stops=st.sampled_from([False, False, False, True]),
        family=st.sampled_from(["all", "all", "all", "prefill", "decode"]),
    )
    def step(self, accepts: list[int], stops: bool, family: Family) -> None:
        self.simulation.step(accepts=accepts, stops=stops, family=family)

    @invariant()
    def bookkeeping_is_exact(self) -> None:
        self.simulation.check()

    def teardown(self) -> None:
        if hasattr(self, "simulation"):
            self.simulation.drain()


TestSchedulerMachine = SchedulerMachine.TestCase


def test_soak_under_a_pool_too_small() -> None:
    """A longer mix than the machine draws, with enough pressure that all the paths are taken."""
    rng = random.Random(20)
    simulation = make_simulation(
        kv_block_size=4,
        num_blocks=24,
        num_speculative_tokens=4,
        extra_budget=20,
        max_num_seqs=8,
        max_model_len=60,
        max_waiting=30,
        enable_chunked_prefill=True,
        enable_prefix_caching=True,
    )
    for _ in range(600):
        if rng.random() < 0.5:
            prompt = tuple(rng.randrange(VOCABULARY) for _ in range(rng.randint(1, 20)))
            simulation.add(prompt, max_tokens=rng.choice([1, 5, 20, 40]))
        if rng.random() < 0.05 and simulation.scheduler.has_unfinished:
            victim = rng.choice([request for request in simulation.requests if not request.is_finished])
            simulation.scheduler.abort(victim.request_id)
        simulation.step(accepts=[rng.randint(0, 4) for _ in range(4)], stops=rng.random() < 0.05, family="all")
        simulation.check()
    simulation.drain()
    kv_cache = simulation.scheduler.kv_cache
    assert {"stop", "length", "abort"} == set(simulation.scheduler.num_finished)
    assert simulation.scheduler.num_preemptions_total > 20
    assert any(request.num_preemptions > 0 and request.finish_reason == "length" for request in simulation.requests)
    assert 0 < kv_cache.num_hit_tokens < kv_cache.num_queried_tokens
