"""Scheduler rules one by one, with a step loop that stands in for the engine."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from outrider.errors import ConfigError, InvalidRequestError, QueueFullError
from outrider.kv_cache.manager import KVCacheManager
from outrider.sampling_params import SamplingParams
from outrider.scheduler.output import SchedulerOutput
from outrider.scheduler.request import Request, RequestStatus
from outrider.scheduler.scheduler import Scheduler, SchedulerConfig

BLOCK = 4


def make_scheduler(
    *,
    num_blocks: int = 64,
    gamma: int = 3,
    max_num_seqs: int = 8,
    max_num_batched_tokens: int = 64,
    enable_chunked_prefill: bool = True,
    max_model_len: int = 64,
    max_waiting: int = 100,
    enable_prefix_caching: bool = True,
) -> Scheduler:
    config = SchedulerConfig(
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        enable_chunked_prefill=enable_chunked_prefill,
        max_model_len=max_model_len,
        max_waiting=max_waiting,
    )
    kv_cache = KVCacheManager(num_blocks=num_blocks, kv_block_size=BLOCK, enable_prefix_caching=enable_prefix_caching)
    return Scheduler(config, kv_cache, num_speculative_tokens=gamma)


def add(scheduler: Scheduler, name: str, num_prompt: int, *, max_tokens: int = 8, first_token: int = 1000) -> Request:
    """A request whose prompt is first_token, first_token + 1, ...; distinct names get distinct prompts by default."""
    offset = 0 if first_token != 1000 else 1000 * (1 + sum(map(ord, name)))
    request = Request.create(
        request_id=name,
        prompt_token_ids=tuple(range(first_token + offset, first_token + offset + num_prompt)),
        params=SamplingParams(max_tokens=max_tokens),
        arrival_time=0.0,
        max_model_len=scheduler.config.max_model_len,
    )
    scheduler.add(request)
    return request


def run(scheduler: Scheduler, output: SchedulerOutput, *, emitted: Callable[[Request], int] = lambda _: 1) -> None:
    """Commit all rows of a step; tokens are their own positions, ``emitted`` says how many a round gives."""
    for chunk in output.prefills:
        request = chunk.request
        tokens: tuple[int, ...] = (request.num_tokens,) if chunk.samples else ()
        ended = bool(tokens) and request.num_tokens + 1 == request.max_total_tokens
        scheduler.commit(
            request,
            num_new_computed=chunk.length,
            new_token_ids=tokens,
            finish_reason="length" if ended else None,
        )
    for row in output.decodes:
        request = row.request
        count = min(emitted(request), row.verify_width, request.max_total_tokens - request.num_tokens)
        tokens = tuple(range(request.num_tokens, request.num_tokens + count))
        ended = request.num_tokens + count == request.max_total_tokens
        scheduler.commit(
            request, num_new_computed=count, new_token_ids=tokens, finish_reason="length" if ended else None
        )


def drain(scheduler: Scheduler, *, limit: int = 500) -> None:
    for _ in range(limit):
        if not scheduler.has_unfinished:
            assert scheduler.kv_cache.num_free == scheduler.kv_cache.num_total
            return
        output = scheduler.schedule()
        assert not output.is_empty
        run(scheduler, output)
    raise AssertionError(f"{scheduler.num_running} running and {scheduler.num_waiting} waiting after {limit} steps")


def names(requests: tuple[Request, ...]) -> list[str]:
    return [request.request_id for request in requests]


def decodes(output: SchedulerOutput) -> list[tuple[str, int]]:
    return [(row.request.request_id, row.verify_width) for row in output.decodes]


def prefills(output: SchedulerOutput) -> list[tuple[str, int, int, bool]]:
    return [(c.request.request_id, c.start, c.length, c.samples) for c in output.prefills]


def test_prompt_of_one_token() -> None:
    scheduler = make_scheduler()
    request = add(scheduler, "a", 1, max_tokens=3)
    first = scheduler.schedule()
    assert prefills(first) == [("a", 0, 1, True)]
    run(scheduler, first)
    assert request.is_decoding
    assert request.anchor == request.output_token_ids[0]
    second = scheduler.schedule()
    assert decodes(second) == [("a", 4)]
    assert len(request.block_ids) * BLOCK >= request.num_computed_tokens + 4
    run(scheduler, second, emitted=lambda _: 4)
    assert request.is_finished
    assert request.finish_reason == "length"
    assert len(request.output_token_ids) == 3
    assert scheduler.kv_cache.num_free == 64


def test_decodes_go_first_then_running_prefills_then_new_requests() -> None:
    scheduler = make_scheduler(max_num_batched_tokens=10)
    add(scheduler, "a", 2)
    run(scheduler, scheduler.schedule())
    add(scheduler, "b", 14)
    add(scheduler, "c", 3)
    second = scheduler.schedule()
    assert decodes(second) == [("a", 4)]
    assert prefills(second) == [("b", 0, 6, False)]
    run(scheduler, second)
    third = scheduler.schedule()
    assert decodes(third) == [("a", 4)]
    assert prefills(third) == [("b", 6, 6, False)]
    run(scheduler, third)
    fourth = scheduler.schedule()
    assert prefills(fourth) == [("b", 12, 2, True), ("c", 0, 3, True)]
    assert fourth.num_batched_tokens == 9
    run(scheduler, fourth)
    drain(scheduler)


def test_without_chunking_a_prompt_waits_until_it_fits_whole() -> None:
    scheduler = make_scheduler(max_num_batched_tokens=20, max_model_len=20, enable_chunked_prefill=False)
    add(scheduler, "a", 2, max_tokens=4)
    run(scheduler, scheduler.schedule())
    add(scheduler, "b", 17, max_tokens=2)
    add(scheduler, "c", 1, max_tokens=2)
    second = scheduler.schedule()
    assert decodes(second) == [("a", 4)]
    assert prefills(second) == []  # c does not overtake b
    run(scheduler, second, emitted=lambda _: 4)
    assert prefills(scheduler.schedule()) == [("b", 0, 17, True), ("c", 0, 1, True)]
    drain(scheduler)


def test_only_the_context_limit_shortens_the_window() -> None:
    scheduler = make_scheduler(max_model_len=16, gamma=7, max_num_batched_tokens=16)
    request = add(scheduler, "a", 6, max_tokens=4)
    run(scheduler, scheduler.schedule())
    assert decodes(scheduler.schedule()) == [("a", 8)]  # max_tokens leaves 3 tokens; the window does not care
    scheduler.abort("a")
    request = add(scheduler, "b", 9, max_tokens=50)
    assert request.max_total_tokens == 16
    run(scheduler, scheduler.schedule())
    widths = []
    while scheduler.has_unfinished:
        output = scheduler.schedule()
        (row,) = output.decodes
        assert request.num_computed_tokens + row.verify_width <= 16
        widths.append(row.verify_width)
        run(scheduler, output)
    assert widths == [7, 6, 5, 4, 3, 2]
    assert request.num_tokens == 16


def test_decodes_beyond_the_budget_take_turns() -> None:
    scheduler = make_scheduler(max_num_batched_tokens=9)
    for name in "abc":
        add(scheduler, name, 1, max_tokens=20)
        run(scheduler, scheduler.schedule(), emitted=lambda _: 1)
    turns = []
    for _ in range(6):
        output = scheduler.schedule()
        assert output.num_batched_tokens <= 9
        turns.append("".join(row.request.request_id for row in output.decodes))
        run(scheduler, output)
    counts = {name: "".join(turns).count(name) for name in "abc"}
    assert counts == {"a": 4, "b": 4, "c": 4}
    drain(scheduler)


def test_a_narrow_row_does_not_overtake_a_wide_one() -> None:
    scheduler = make_scheduler(max_model_len=16, max_num_batched_tokens=6)
    for name in ("wide1", "wide2"):
        add(scheduler, name, 1, max_tokens=15)
    narrow = add(scheduler, "narrow", 13, max_tokens=3)
    while narrow.num_computed_tokens < 14:
        run(scheduler, scheduler.schedule())
    output = scheduler.schedule()
    (row,) = output.decodes  # 4 of 6 rows; the other wide one waits, and so does narrow, which needs only 2
    assert row.request is not narrow
    assert row.verify_width == 4
    drain(scheduler)


def test_a_row_given_to_a_younger_request_is_revoked_with_its_budget() -> None:
    scheduler = make_scheduler(num_blocks=6, max_num_batched_tokens=11, enable_prefix_caching=False)
    for name in "abc":
        add(scheduler, name, 4, max_tokens=5)
    run(scheduler, scheduler.schedule())  # the budget ends within c's prompt, so c decodes one step later
    run(scheduler, scheduler.schedule())
    output = scheduler.schedule()  # c's turn is first and takes the last block, which a needs
    assert names(output.preempted) == ["c"]
    assert decodes(output) == [("a", 4), ("b", 4)]
    run(scheduler, output)
    drain(scheduler)


def test_short_memory_preempts_the_youngest_which_resumes_with_its_anchor() -> None:
    scheduler = make_scheduler(num_blocks=7, enable_prefix_caching=False)
    old = add(scheduler, "old", 7, max_tokens=14)
    young = add(scheduler, "young", 7, max_tokens=14)
    run(scheduler, scheduler.schedule())
    preempted: list[str] = []
    while not preempted:
        output = scheduler.schedule()
        preempted = names(output.preempted)
        tokens_then, anchor_then = young.num_tokens, young.anchor
        run(scheduler, output)
    assert preempted == ["young"]
    assert young.status is RequestStatus.PREEMPTED
    assert young.block_ids == []
    assert young.num_computed_tokens == 0
    assert young.num_preemptions == scheduler.num_preemptions_total == 1
    while not old.is_finished:
        run(scheduler, scheduler.schedule())
    resumed = scheduler.schedule()
    assert prefills(resumed) == [("young", 0, tokens_then - 1, False)]
    run(scheduler, resumed)
    assert young.is_decoding
    assert young.anchor == anchor_then
    drain(scheduler)
    assert young.output_token_ids == list(range(7, 21))


def test_a_request_that_finds_all_its_prefix_again_decodes_in_the_same_step() -> None:
    scheduler = make_scheduler(num_blocks=12, gamma=3)
    old = add(scheduler, "old", 4, max_tokens=30)
    young = add(scheduler, "young", 4, max_tokens=30)
    run(scheduler, scheduler.schedule())
    for _ in range(4):  # young.num_tokens == 9: two full blocks and the anchor
        run(scheduler, scheduler.schedule())
    assert young.num_tokens == 9
    scheduler._preempt(young)
    output = scheduler.schedule()
    assert prefills(output) == []
    assert decodes(output) == [("old", 4), ("young", 4)]
    assert young.num_computed_tokens == 8
    assert young.num_cached_tokens == 0  # its own blocks found again are no prompt tokens served
    assert len(young.block_ids) == 3
    run(scheduler, output)
    drain(scheduler)
    assert old.num_tokens == young.num_tokens == 34


def test_a_request_with_nothing_to_prefill_waits_until_the_budget_has_room_for_its_row() -> None:
    scheduler = make_scheduler(num_blocks=12, gamma=3, max_num_batched_tokens=8)
    for name in ("old", "young"):
        add(scheduler, name, 4, max_tokens=6)
    run(scheduler, scheduler.schedule())
    for _ in range(4):
        run(scheduler, scheduler.schedule())
    add(scheduler, "third", 5, max_tokens=1)
    young = scheduler.get("young")
    assert young is not None
    scheduler._preempt(young)
    scheduler.config = replace(scheduler.config, max_num_batched_tokens=7)
    output = scheduler.schedule()
    assert decodes(output) == [("old", 4)]
    assert prefills(output) == []
    run(scheduler, output)  # old ends
    assert decodes(scheduler.schedule()) == [("young", 4)]
    drain(scheduler)


def test_a_new_request_leaves_a_block_for_each_running_one() -> None:
    scheduler = make_scheduler(num_blocks=4, enable_prefix_caching=False)
    add(scheduler, "a", 4, max_tokens=4)
    run(scheduler, scheduler.schedule())
    add(scheduler, "b", 8, max_tokens=1)  # two blocks, which are free beside the two of a's window
    output = scheduler.schedule()
    assert decodes(output) == [("a", 4)]
    assert prefills(output) == []
    assert scheduler.kv_cache.num_free == 2
    run(scheduler, output, emitted=lambda _: 4)
    assert prefills(scheduler.schedule()) == [("b", 0, 8, True)]
    drain(scheduler)


def test_prefix_hit_skips_committed_blocks_and_is_counted() -> None:
    scheduler = make_scheduler()
    add(scheduler, "a", 10, first_token=1, max_tokens=1)
    run(scheduler, scheduler.schedule())
    second = add(scheduler, "b", 10, first_token=1, max_tokens=1)
    output = scheduler.schedule()
    assert prefills(output) == [("b", 8, 2, True)]
    assert second.num_cached_tokens == 8
    assert scheduler.kv_cache.num_queried_tokens == 20
    assert scheduler.kv_cache.num_hit_tokens == 8
    run(scheduler, output)
    drain(scheduler)


def test_a_prompt_of_whole_blocks_leaves_its_last_block_to_compute() -> None:
    scheduler = make_scheduler()
    add(scheduler, "a", 8, first_token=1, max_tokens=1)
    run(scheduler, scheduler.schedule())
    add(scheduler, "b", 8, first_token=1, max_tokens=1)
    assert prefills(scheduler.schedule()) == [("b", 4, 4, True)]


def test_a_prefix_is_not_shared_before_it_is_committed() -> None:
    scheduler = make_scheduler()
    first, second = (add(scheduler, name, 8, first_token=1) for name in "ab")
    output = scheduler.schedule()
    assert prefills(output) == [("a", 0, 8, True), ("b", 0, 8, True)]
    assert not set(first.block_ids) & set(second.block_ids)
    run(scheduler, output)
    drain(scheduler)


def test_rejected_slots_are_returned() -> None:
    scheduler = make_scheduler(gamma=11)
    request = add(scheduler, "a", 4, max_tokens=20)
    run(scheduler, scheduler.schedule())
    output = scheduler.schedule()
    assert len(request.block_ids) == 4  # slots 0..15
    run(scheduler, output)
    assert len(request.block_ids) == 2  # slots 0..4 are committed


def test_rows_that_were_not_run_are_scheduled_again() -> None:
    scheduler = make_scheduler()
    add(scheduler, "a", 5)
    run(scheduler, scheduler.schedule())
    add(scheduler, "b", 5)
    first = scheduler.schedule()
    again = scheduler.schedule()
    assert first == again
    run(scheduler, again)
    drain(scheduler)


@pytest.mark.parametrize("stage", ["waiting", "prefilling", "running", "preempted"])
def test_abort_frees_everything_at_any_stage(stage: str) -> None:
    scheduler = make_scheduler(max_num_batched_tokens=8)
    request = add(scheduler, "a", 12)
    if stage != "waiting":
        run(scheduler, scheduler.schedule())
    if stage in ("running", "preempted"):
        run(scheduler, scheduler.schedule())
        scheduler.schedule()
        assert request.is_decoding
    if stage == "preempted":
        scheduler._preempt(request)
    assert scheduler.abort("a") is request
    assert request.finish_reason == "abort"
    assert scheduler.abort("a") is None
    assert not scheduler.has_unfinished
    assert scheduler.num_running == scheduler.num_waiting == 0
    assert scheduler.kv_cache.num_free == 64
    assert scheduler.num_finished == {"abort": 1}


def test_commit_for_a_finished_request_is_an_error() -> None:
    scheduler = make_scheduler()
    request = add(scheduler, "a", 3)
    scheduler.schedule()
    scheduler.abort("a")
    with pytest.raises(AssertionError, match=r"commit of a, which is RequestStatus\.FINISHED"):
        scheduler.commit(request, num_new_computed=3, new_token_ids=(1,), finish_reason=None)


@pytest.mark.parametrize(
    ("num_new_computed", "new_token_ids"),
    [(3, ()), (3, (1, 2)), (2, (1,)), (4, (1,)), (0, ())],
)
def test_commit_of_a_prefill_checks_its_counts(num_new_computed: int, new_token_ids: tuple[int, ...]) -> None:
    scheduler = make_scheduler()
    request = add(scheduler, "a", 3)
    scheduler.schedule()
    with pytest.raises(AssertionError):
        scheduler.commit(request, num_new_computed=num_new_computed, new_token_ids=new_token_ids, finish_reason=None)


def test_seats_limit_the_running_requests() -> None:
    scheduler = make_scheduler(max_num_seqs=2)
    for name in "abc":
        add(scheduler, name, 2)
    run(scheduler, scheduler.schedule())
    assert (scheduler.num_running, scheduler.num_waiting) == (2, 1)
    drain(scheduler)


def test_a_full_queue_refuses_and_leaves_no_trace() -> None:
    scheduler = make_scheduler(max_waiting=2)
    add(scheduler, "a", 2)
    add(scheduler, "b", 2)
    with pytest.raises(QueueFullError, match="2 requests wait already; max_waiting=2"):
        add(scheduler, "c", 2)
    assert scheduler.get("c") is None
    drain(scheduler)


@pytest.mark.parametrize(
    ("num_prompt", "max_tokens", "message"),
    [
        (0, 1, "prompt has 0 tokens"),
        (64, 1, "prompt has 64 tokens; with one new token it exceeds max_model_len=64"),
        (20, 20, r"prompt of 20 tokens with up to 20 new ones needs 11 KV blocks of 4 tokens; the KV memory has 10"),
        (41, 1, r"needs 11 KV blocks"),
    ],
)
def test_requests_that_can_never_finish_are_refused(num_prompt: int, max_tokens: int, message: str) -> None:
    scheduler = make_scheduler(num_blocks=10)
    with pytest.raises(InvalidRequestError, match=message):
        add(scheduler, "a", num_prompt, max_tokens=max_tokens)
    assert not scheduler.has_unfinished


@pytest.mark.parametrize(("num_prompt", "max_tokens"), [(20, 18), (40, 1), (39, 2), (1, 37)])
def test_requests_that_just_fit_finish_alone(num_prompt: int, max_tokens: int) -> None:
    scheduler = make_scheduler(num_blocks=10 if num_prompt != 39 else 11)
    request = add(scheduler, "a", num_prompt, max_tokens=max_tokens)
    drain(scheduler)
    assert len(request.output_token_ids) == max_tokens


def test_an_id_in_use_is_refused() -> None:
    scheduler = make_scheduler()
    add(scheduler, "a", 2)
    with pytest.raises(InvalidRequestError, match="request_id='a' is in use"):
        add(scheduler, "a", 2)


def test_configurations_that_cannot_run_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"max_num_batched_tokens=7 must be at least 8.*num_speculative_tokens=7"):
        make_scheduler(gamma=7, max_num_batched_tokens=7)
    with pytest.raises(ConfigError, match="max_num_batched_tokens=63 must be at least max_model_len=64"):
        make_scheduler(enable_chunked_prefill=False, max_num_batched_tokens=63)
    with pytest.raises(ConfigError, match="max_num_seqs=0"):
        make_scheduler(max_num_seqs=0)
    with pytest.raises(ConfigError, match="max_model_len=1"):
        make_scheduler(max_model_len=1)
    with pytest.raises(ConfigError, match="num_speculative_tokens=-1"):
        make_scheduler(gamma=-1)


def test_without_drafting_the_width_is_one() -> None:
    scheduler = make_scheduler(gamma=0)
    add(scheduler, "a", 2, max_tokens=3)
    run(scheduler, scheduler.schedule())
    assert decodes(scheduler.schedule()) == [("a", 1)]
    drain(scheduler)
