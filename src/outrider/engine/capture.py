"""Capture of the tiers at start-up, and the proof that no step asks for another.

Every rank captures the same keys in the same order: where experts are spread over ranks, each capture runs their
collectives.
"""

from __future__ import annotations

import sys
import time

from tqdm import tqdm

from outrider.batch.step_plan import PassKind, PassWidths, plan_capture
from outrider.logger import get_logger
from outrider.runner.batch_builder import BatchBuilder
from outrider.runner.graph_runner import GraphRunner
from outrider.runner.model_runner import ModelRunner
from outrider.runner.reachable import EAGER_WITH_TIERS, EAGER_WITHOUT_TIERS, prove_captured, reachable_keys
from outrider.spec_decode.proposer import Proposer

logger = get_logger(__name__)


def capture_tiers(
    *,
    graphs: GraphRunner,
    runner: ModelRunner,
    proposer: Proposer,
    builder: BatchBuilder,
    num_dp_ranks: int,
    max_num_seqs: int,
    show_progress: bool,
) -> None:
    """Capture target and draft passes of every tier of ``graphs``; then prove that this is all a step can ask for.

    ``show_progress``: with a bar, if there is a terminal; one rank's is enough.
    """
    widths = PassWidths(draft=proposer.draft_width, verify=1 + proposer.num_speculative_tokens)
    start = time.perf_counter()
    kinds = (PassKind.VERIFY, PassKind.DRAFT) if widths.draft else (PassKind.VERIFY,)
    jobs = [(kind, tier) for tier in reversed(graphs.tiers) for kind in kinds]
    hidden = not (show_progress and jobs and sys.stderr.isatty())
    for kind, tier in tqdm(jobs, desc="capture", unit="pass", disable=hidden):
        plan = plan_capture(kind, tier=tier, widths=widths, num_ranks=num_dp_ranks)
        if kind is PassKind.DRAFT:
            proposer.capture(plan)
        else:
            runner.capture(plan, builder)
    reachable = reachable_keys(
        tiers=graphs.tiers, widths=widths, max_num_seqs=max_num_seqs, graph_capable=graphs.capable
    )
    eager = EAGER_WITH_TIERS if graphs.tiers else EAGER_WITHOUT_TIERS
    prove_captured(reachable, captured=graphs.captured_keys, eager=eager)
    if graphs.tiers:
        logger.info(
            "tiers captured: %s in %.1f s, static buffers %.1f MiB",
            describe_captured(graphs),
            time.perf_counter() - start,
            graphs.static_bytes / 2**20,
        )


def describe_captured(graphs: GraphRunner) -> str:
    """``target 27/27, draft 27/27``: captured keys of tiers; a model without a pass is left out."""
    parts = []
    for name, model in (("target", "target"), ("draft", "drafter")):
        count = sum(key.model == model for key in graphs.captured_keys)
        if count:
            parts.append(f"{name} {count}/{len(graphs.tiers)}")
    return ", ".join(parts)
