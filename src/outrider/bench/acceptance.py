"""Acceptance of drafts: every data set once with the drafter, then once with prompt lookup of the same depth.

Accepted length is pooled, emitted tokens of all rounds over all rounds, so that long answers count for more; the
interval is over prompts, because the rounds of one answer resemble each other.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from outrider.bench.contenders import Contenders
from outrider.bench.figures import Spread, bootstrap_ci95
from outrider.bench.run import run_requests
from outrider.bench.served import Served
from outrider.bench.workload import BenchRequest
from outrider.config import ProposerName
from outrider.errors import ConfigError
from outrider.outputs import SpecCounters
from outrider.spec_decode.counters import merge_counters


@dataclass(frozen=True, slots=True, kw_only=True)
class Acceptance:
    """Of one proposer over some prompts."""

    num_prompts: int
    num_tokens: int  # all that were emitted, the first of each answer included
    spec: SpecCounters
    ci95: tuple[float, float]  # of the pooled accepted length
    per_prompt: Spread  # accepted lengths of single prompts; of 0.0 where none had a round

    @classmethod
    def of(cls, served: Sequence[Served]) -> Acceptance:
        specs = [each.spec for each in served]
        lengths = [spec.accepted_length for spec in specs if spec.rounds]
        return cls(
            num_prompts=len(served),
            num_tokens=sum(each.num_tokens for each in served),
            spec=merge_counters(specs),
            ci95=bootstrap_ci95([spec.emitted for spec in specs], [spec.rounds for spec in specs]),
            per_prompt=Spread.of(lengths or [0.0]),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Compared:
    """The chosen proposer, and prompt lookup on the same prompts. They are one and the same if lookup was chosen."""

    chosen: Acceptance
    lookup: Acceptance


@dataclass(frozen=True, slots=True, kw_only=True)
class AcceptanceReport:
    pooled: Compared
    by_data: Mapping[str, Compared]


def measure_acceptance(
    contenders: Contenders,
    data: Mapping[str, Sequence[BenchRequest]],
    *,
    on_served: Callable[[], object] = lambda: None,
) -> AcceptanceReport:
    """``data``: requests by the name of their data set. ``on_served`` is called once a request and proposer."""
    limit = contenders.config.speculative_disable_by_batch_size
    if limit:
        raise ConfigError(
            f"speculative_disable_by_batch_size={limit} leaves drafts out under load, and acceptance is measured with "
            "all requests together; leave it out here"
        )
    chosen = contenders.config.proposer
    measured = {name: _serve(contenders, name, data, on_served) for name in dict.fromkeys((chosen, "lookup"))}

    def compare(served: Mapping[str, Sequence[Served]]) -> Compared:
        return Compared(chosen=Acceptance.of(served[chosen]), lookup=Acceptance.of(served["lookup"]))

    return AcceptanceReport(
        pooled=compare(
            {name: [each for sets in by_data.values() for each in sets] for name, by_data in measured.items()}
        ),
        by_data={name: compare({proposer: by_data[name] for proposer, by_data in measured.items()}) for name in data},
    )


def require_drafts(proposer: ProposerName, *, draft: str, model: str) -> None:
    """Refuse to measure the acceptance of no drafts."""
    if proposer != "none":
        return
    if draft == "auto":
        raise ConfigError(
            f"draft='auto': no drafter is bundled for model={model!r}, so there are no drafts to accept; "
            "give --draft with a drafter's directory, or lookup"
        )
    raise ConfigError("draft='none' proposes no drafts to accept; give auto, lookup or a drafter's directory")


def _serve(
    contenders: Contenders,
    name: ProposerName,
    data: Mapping[str, Sequence[BenchRequest]],
    on_served: Callable[[], object],
) -> dict[str, tuple[Served, ...]]:
    """Of each data set, with an engine that is gone afterwards."""
    together = contenders.args.max_num_seqs
    room = max(contenders.num_kv_tokens(requests, max_concurrency=together) for requests in data.values())
    core = contenders.build(name, num_kv_tokens=room)
    return {
        label: run_requests(core, requests, max_concurrency=len(requests), on_served=on_served).served
        for label, requests in data.items()
    }
