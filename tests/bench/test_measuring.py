"""Measuring on small models with known answers: counters and outputs are exact, times are only plausible."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
from tests import fixtures

from outrider.bench.acceptance import measure_acceptance
from outrider.bench.contenders import Contenders
from outrider.bench.http_load import HttpTarget, run_over_http
from outrider.bench.http_server import serving
from outrider.bench.run import run_requests
from outrider.bench.served import Run
from outrider.bench.throughput import Load, measure_server
from outrider.bench.workload import BenchRequest, SamplingPlan
from outrider.config import EngineArgs
from outrider.engine.engine import Engine
from outrider.engine.setup import resolve
from outrider.errors import ConfigError, OutriderError

PLAN = SamplingPlan(max_tokens=17, temperature=0.0, top_p=1.0, ignore_eos=True, sampling_seed=0)


@pytest.fixture(scope="module")
def contenders(tmp_path_factory: pytest.TempPathFactory) -> Contenders:
    """CYCLE with HALF: accepted length 4 where the first generated token is at orbit index 0 mod 4."""
    directory = tmp_path_factory.mktemp("bench")
    target = fixtures.make_cycle_target(directory / "target")
    drafter = fixtures.make_half_drafter(directory / "drafter")
    return Contenders.load(EngineArgs(model=str(target), draft=str(drafter), max_num_seqs=4))


def _requests(count: int, *, max_tokens: int = 17) -> list[BenchRequest]:
    plan = dataclasses.replace(PLAN, max_tokens=max_tokens)
    return [
        BenchRequest(
            text=None,
            chat=False,
            token_ids=tuple(fixtures.orbit_prompt(10 + i, first_generated_index=4 * i)),
            params=plan.params(i),
        )
        for i in range(count)
    ]


def _answers(requests: list[BenchRequest]) -> list[tuple[int, ...]]:
    return [tuple(fixtures.continuation(request.token_ids, request.params.max_tokens or 0)) for request in requests]


def _core(contenders: Contenders) -> Engine:
    return contenders.build("dspark", num_kv_tokens=1)


def test_the_contenders_differ_in_the_proposer_alone(contenders: Contenders) -> None:
    assert contenders.names == ("dspark", "lookup", "none")
    configs = {name: contenders.build(name, num_kv_tokens=1).config for name in contenders.names}
    assert [(c.proposer, c.num_speculative_tokens) for c in configs.values()] == [
        ("dspark", 7),
        ("lookup", 7),
        ("none", 0),
    ]
    same = {
        dataclasses.replace(config, proposer="none", num_speculative_tokens=0, drafter_path="")
        for config in configs.values()
    }
    assert len(same) == 1
    assert not next(iter(same)).enable_prefix_caching
    assert next(iter(same)).num_kv_blocks == 4096 // 16


def test_the_memory_a_user_sets_is_kept(contenders: Contenders) -> None:
    block_bytes = 16 * resolve(contenders.args).layout.bytes_per_token
    args = dataclasses.replace(contenders.args, kv_cache_memory_bytes=100 * block_bytes)
    small = dataclasses.replace(contenders, args=args)
    assert small.build("dspark", num_kv_tokens=10_000).config.num_kv_blocks == 100


def test_room_for_the_longest_requests_that_run_together(contenders: Contenders) -> None:
    requests = _requests(9)
    # the longest has 18 + 17 tokens, a window of 8 behind it, and its last page may be nearly empty
    assert contenders.num_kv_tokens(requests, max_concurrency=2) == 2 * (18 + 17 + 8 + 16)
    assert contenders.num_kv_tokens(requests, max_concurrency=50) == 4 * (18 + 17 + 8 + 16)
    assert contenders.num_kv_tokens(requests[:1], max_concurrency=50) == 10 + 17 + 8 + 16


def _check(run: Run, count: int) -> None:
    assert [served.num_tokens for served in run.served] == [17] * count
    assert (run.spec.rounds, run.spec.emitted) == (4 * count, 16 * count)
    assert run.spec.accepted_length == 4.0
    for served in run.served:
        assert 0 < served.ttft_s < served.e2e_s


def test_a_closed_loop_keeps_its_limit(contenders: Contenders) -> None:
    core, requests = _core(contenders), _requests(5)
    in_flight: list[int] = []
    run = run_requests(core, requests, max_concurrency=2, on_served=lambda: in_flight.append(core.stats().num_running))
    _check(run, 5)
    assert [served.token_ids for served in run.served] == _answers(requests)
    assert max(in_flight) <= 2
    assert run.elapsed_s >= max(served.e2e_s for served in run.served)
    assert sum(served.e2e_s for served in run.served) > run.elapsed_s  # two at a time


def test_arrivals_are_waited_for_and_times_count_from_them(contenders: Contenders) -> None:
    requests = _requests(3)
    run = run_requests(_core(contenders), requests, max_concurrency=1, arrivals_s=(0.0, 0.0, 0.4))
    _check(run, 3)
    assert [served.token_ids for served in run.served] == _answers(requests)
    first, second, third = run.served
    assert second.ttft_s > first.e2e_s  # due at once, it waited for the first
    assert run.elapsed_s >= 0.4 + third.e2e_s


def test_acceptance_is_pooled_over_data_sets(contenders: Contenders) -> None:
    data = {"even": _requests(2), "short": _requests(2, max_tokens=6)}
    count: list[None] = []
    report = measure_acceptance(contenders, data, on_served=lambda: count.append(None))
    assert len(count) == 2 * 4
    even, short = report.by_data["even"].chosen, report.by_data["short"].chosen
    assert (even.spec.accepted_length, even.ci95, even.per_prompt.min, even.per_prompt.max) == (
        4.0,
        (4.0, 4.0),
        4.0,
        4.0,
    )
    assert (even.num_prompts, even.num_tokens) == (2, 34)
    assert (short.spec.rounds, short.spec.emitted) == (4, 10)  # one from prefill, then 4 and 1 of each prompt
    pooled = report.pooled.chosen
    assert (pooled.spec.rounds, pooled.spec.emitted, pooled.num_prompts) == (12, 42, 4)
    assert pooled.ci95[0] < pooled.spec.accepted_length < pooled.ci95[1]
    assert report.by_data["even"].lookup.spec.emitted == 32
    assert report.pooled.lookup.spec.accepted_length < 2


def test_acceptance_of_an_engine_that_leaves_drafts_out_is_refused(contenders: Contenders) -> None:
    limited = Contenders.load(dataclasses.replace(contenders.args, speculative_disable_by_batch_size=1))
    with pytest.raises(ConfigError, match="speculative_disable_by_batch_size=1 leaves drafts out"):
        measure_acceptance(limited, {"even": _requests(2)})


def test_http_counts_what_the_python_api_counts(contenders: Contenders) -> None:
    served: list[None] = []
    requests = _requests(5)
    core = _core(contenders)
    run_requests(core, requests[:1], max_concurrency=1)  # counters do not start at zero
    with serving(core, "cycle") as target:
        run = run_over_http(target, requests, max_concurrency=2, arrivals_s=None, on_served=lambda: served.append(None))
        _check(run, 5)
        assert run.spec.per_position == ((20, 20),) * 3 + ((20, 0),) * 4
        late = run_over_http(target, requests[:2], max_concurrency=2, arrivals_s=(0.0, 0.3), on_served=list)
        assert late.elapsed_s >= 0.3 + late.served[1].e2e_s
        load = Load(requests=requests[:2], max_concurrency=1, arrivals_s=None, repeat=2)
        assert measure_server(target, load).num_tokens == 2 * 2 * 17
    assert len(served) == 5


def test_a_server_that_refuses_or_is_not_there_is_an_error(contenders: Contenders) -> None:
    (request,) = _requests(1)
    wrong = dataclasses.replace(request, token_ids=(99,))
    with serving(_core(contenders), "cycle") as target:
        with pytest.raises(OutriderError, match="request 1 was answered with status 400"):
            run_over_http(target, [request, wrong], max_concurrency=2, arrivals_s=None, on_served=list)
        gone = target
    with pytest.raises(OutriderError, match=f"base_url={gone.base_url}"):
        run_over_http(gone, [request], max_concurrency=1, arrivals_s=None, on_served=list)
    nowhere = HttpTarget(base_url=f"{gone.base_url}/other", api_key="k", in_this_process=True)
    with pytest.raises(OutriderError):
        run_over_http(nowhere, [request], max_concurrency=1, arrivals_s=None, on_served=list)


def test_a_prompt_that_does_not_fit_is_refused(contenders: Contenders) -> None:
    (request,) = _requests(1)
    long = dataclasses.replace(request, token_ids=(1,) * fixtures.MAX_POSITIONS)
    with pytest.raises(OutriderError, match=str(fixtures.MAX_POSITIONS)):
        run_requests(_core(contenders), [long], max_concurrency=1)


def test_a_model_directory_without_drafter(contenders: Contenders, tmp_path: Path) -> None:
    args = dataclasses.replace(contenders.args, draft="none", num_speculative_tokens=3)
    plain = Contenders.load(args)
    assert plain.names == ("lookup", "none")
    assert plain.build("lookup", num_kv_tokens=1).config.num_speculative_tokens == 3
