"""Prometheus metrics, named in vLLM's manner below ``outrider:``, in a registry of their own.

Counters and gauges are read from the engine when scraped; only the latency histograms are kept here, because the
server sees when a request's tokens arrive.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from prometheus_client import CollectorRegistry, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from outrider.outputs import EngineStats, RequestOutput
from outrider.server.engine_client import AsyncEngineClient

_TTFT_BUCKETS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)
_TPOT_BUCKETS = (0.002, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.2, 0.4, 0.8, 1.6)
_E2E_BUCKETS = (0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 20.0, 40.0, 60.0, 120.0, 300.0, 600.0)


def kv_usage(stats: EngineStats) -> float:
    """Share of KV blocks held by requests; cached blocks that may be evicted count as free."""
    if not stats.kv_blocks_total:
        return 0.0
    return (stats.kv_blocks_total - stats.kv_blocks_free) / stats.kv_blocks_total


class _EngineCollector(Collector):
    def __init__(self, engine: AsyncEngineClient, *, model_name: str) -> None:
        self._engine = engine
        self._model_name = model_name

    def collect(self) -> Iterator[Metric]:
        stats = self._engine.stats()
        yield from self._gauges(stats)
        yield from self._counters(stats)
        ranks = self._engine.rank_stats()
        if len(ranks) > 1:
            yield from self._of_ranks(ranks)

    def _gauges(self, stats: EngineStats) -> Iterator[Metric]:
        for name, text, value in (
            ("num_requests_running", "Requests being prefilled or decoded.", stats.num_running),
            ("num_requests_waiting", "Requests in the queue.", stats.num_waiting),
            ("kv_cache_usage_perc", "Share of KV blocks in use, 0 to 1.", kv_usage(stats)),
            (
                "spec_decode_accepted_length",
                "Emitted tokens per round since start, the bonus token included.",
                stats.spec.accepted_length,
            ),
            (
                "spec_decode_acceptance_rate",
                "Accepted drafts / offered drafts since start.",
                stats.spec.acceptance_rate,
            ),
        ):
            gauge = GaugeMetricFamily(f"outrider:{name}", text, labels=["model_name"])
            gauge.add_metric([self._model_name], value)
            yield gauge

    def _of_ranks(self, ranks: Sequence[EngineStats]) -> Iterator[Metric]:
        """What tells whether requests are well spread."""
        labels = ["model_name", "dp_rank"]
        for name, text, values in (
            ("rank_num_requests_running", "Requests of a rank.", [stats.num_running for stats in ranks]),
            ("rank_num_requests_waiting", "Requests queued on a rank.", [stats.num_waiting for stats in ranks]),
            ("rank_kv_cache_usage_perc", "Share of a rank's KV blocks in use, 0 to 1.", list(map(kv_usage, ranks))),
        ):
            gauge = GaugeMetricFamily(f"outrider:{name}", text, labels=labels)
            for rank, value in enumerate(values):
                gauge.add_metric([self._model_name, str(rank)], value)
            yield gauge
        generated = CounterMetricFamily("outrider:rank_generation_tokens", "Tokens emitted by a rank.", labels=labels)
        for rank, stats in enumerate(ranks):
            generated.add_metric([self._model_name, str(rank)], stats.generation_tokens_total)
        yield generated

    def _counters(self, stats: EngineStats) -> Iterator[Metric]:
        spec = stats.spec
        for name, text, value in (
            ("prompt_tokens", "Prompt tokens of admitted requests.", stats.prompt_tokens_total),
            ("generation_tokens", "Tokens emitted.", stats.generation_tokens_total),
            ("num_preemptions", "Requests that had to give up their KV blocks.", stats.preemptions_total),
            ("prefix_cache_queries", "Prompt tokens looked up in the prefix cache.", stats.prefix_cache_queries),
            ("prefix_cache_hits", "Prompt tokens found in the prefix cache.", stats.prefix_cache_hits),
            ("engine_steps", "Engine steps.", stats.steps_total),
            ("graph_replays", "Passes run from a captured tier.", stats.graph_replays_total),
            ("spec_decode_num_drafts", "Rounds: blocks of drafts verified.", spec.rounds),
            ("spec_decode_num_draft_tokens", "Drafts offered.", spec.offered),
            ("spec_decode_num_accepted_tokens", "Drafts that became output.", spec.accepted),
            ("spec_decode_num_emitted_tokens", "Tokens emitted by rounds, bonus included.", spec.emitted),
            ("spec_decode_num_undrafted_tokens", "Tokens not drafted due to load.", stats.undrafted_tokens_total),
        ):
            counter = CounterMetricFamily(f"outrider:{name}", text, labels=["model_name"])
            counter.add_metric([self._model_name], value)
            yield counter
        finished = CounterMetricFamily(
            "outrider:request_success", "Requests ended, by reason.", labels=["model_name", "finished_reason"]
        )
        for reason, count in sorted(stats.requests_finished.items()):
            finished.add_metric([self._model_name, reason], count)
        yield finished
        load = CounterMetricFamily(
            "outrider:expert_rows",
            "Rows computed by an expert, summed over layers; rank is the one that holds it, or all where each has a "
            "slice of it.",
            labels=["model_name", "part", "rank", "expert"],
        )
        size = stats.expert_parallel_size
        for part, rows in stats.expert_load.items():
            for expert, count in enumerate(rows):
                rank = str(expert * size // len(rows)) if size > 1 else "all"
                load.add_metric([self._model_name, part, rank, str(expert)], count)
        yield load
        labels = ["model_name", "position"]
        offered = CounterMetricFamily(
            "outrider:spec_decode_num_draft_tokens_per_pos", "Drafts offered, by position in the block.", labels=labels
        )
        accepted = CounterMetricFamily(
            "outrider:spec_decode_num_accepted_tokens_per_pos",
            "Drafts that became output, by position in the block.",
            labels=labels,
        )
        for position, (num_offered, num_accepted) in enumerate(spec.per_position):
            offered.add_metric([self._model_name, str(position)], num_offered)
            accepted.add_metric([self._model_name, str(position)], num_accepted)
        yield offered
        yield accepted


class ServerMetrics:
    def __init__(self, engine: AsyncEngineClient, *, model_name: str) -> None:
        self._registry = CollectorRegistry()
        self._registry.register(_EngineCollector(engine, model_name=model_name))

        def histogram(name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
            family = Histogram(
                f"outrider:{name}", text, labelnames=["model_name"], buckets=buckets, registry=self._registry
            )
            return family.labels(model_name=model_name)

        self._ttft = histogram("time_to_first_token_seconds", "From arrival to the first token.", _TTFT_BUCKETS)
        self._tpot = histogram(
            "request_time_per_output_token_seconds",
            "Mean time between a finished request's tokens, of each sequence.",
            _TPOT_BUCKETS,
        )
        self._e2e = histogram("e2e_request_latency_seconds", "From arrival to the last token.", _E2E_BUCKETS)

    def render(self) -> bytes:
        """The exposition text, Prometheus format 0.0.4."""
        return generate_latest(self._registry)

    def first_token(self, output: RequestOutput) -> None:
        self._ttft.observe(output.timing.ttft_s)

    def finished(self, output: RequestOutput) -> None:
        self._e2e.observe(output.timing.e2e_s)
        longest = max(len(completion.token_ids) for completion in output.outputs)
        if longest > 1:
            self._tpot.observe((output.timing.e2e_s - output.timing.ttft_s) / (longest - 1))
