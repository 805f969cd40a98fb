"""Proof at start-up that a step never meets an uncaptured tier.

What a step can ask for is enumerated from ``plan_step`` itself, over every request count a rank can hold, and not from
the list of tiers: a plan that chose a tier in any other way would be found here and not by a hang under load.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from collections.abc import Set as AbstractSet

from outrider.batch.step_plan import EAGER, PassKind, PassWidths, RankRow, plan_step
from outrider.runner.graph_runner import GraphKey

EAGER_WITH_TIERS = frozenset({PassKind.PREFILL})  # ragged rows
EAGER_WITHOUT_TIERS = frozenset(PassKind)


def reachable_keys(
    *, tiers: Sequence[int], widths: PassWidths, max_num_seqs: int, graph_capable: bool
) -> set[GraphKey]:
    """Keys of every pass a rank can be asked to run.

    Rank 0 is alone, or idle beside the busiest rank, or as busy, for every load of the latter, with and without a rank
    that prefills. Other loads of its own change no key of a tier: the tier is the busiest rank's.
    """
    keys = set()
    for largest in range(max_num_seqs + 1):
        for counts in ((largest,), (0, largest), (largest, largest)):
            for prefills in (0, 1):
                rows = [
                    RankRow(
                        prefill_requests=prefills,
                        prefill_tokens=prefills,
                        prefill_logit_rows=prefills,
                        draft_requests=requests if widths.draft else 0,
                        verify_requests=requests,
                        verify_tokens=requests * widths.verify,
                        graph_capable=int(graph_capable),
                    )
                    for requests in counts
                ]
                plan = plan_step(rows, tiers=tiers, widths=widths)
                keys |= {GraphKey.of(pass_plan, 0) for pass_plan in plan.passes}
    return keys


def prove_captured(
    reachable: Iterable[GraphKey], *, captured: AbstractSet[GraphKey], eager: AbstractSet[PassKind]
) -> None:
    """Raises unless every reachable key is captured, or runs eagerly in a kind of pass declared to."""
    tier_keys = set()
    for key in reachable:
        if key.requests.value == EAGER:
            assert key.kind in eager, f"{key} would run eagerly, which only {sorted(eager)} passes are declared to"
        else:
            assert key in captured, f"{key} is reachable but was not captured"
            tier_keys.add(key)
    assert captured <= tier_keys, f"captured but never reached: {sorted(map(str, captured - tier_keys))}"
