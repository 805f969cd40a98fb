"""The two forms of drafting and accepting: in torch, and in one compiled call each. An engine uses one of them.

They mean the same. Probabilities differ in last bits (exponentials and the order of a sum), so that a seeded request
may once in many thousands of tokens go another way in the other form; greedy requests never do, with the same logits.
In both, a request's result depends on its own rows alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from torch import Tensor

from outrider.sampling import proposal, rejection
from outrider.sampling.processors import process
from outrider.sampling.proposal import Proposal, SequentialHead
from outrider.sampling.rejection import Accepted
from outrider.sampling.state import LogitRow


class SamplingBackend(Protocol):
    def propose(
        self,
        *,
        drafter: SequentialHead,
        base_logits_RGV: Tensor,
        hidden_RGD: Tensor,
        anchor_ids_R: Tensor,
        rows: Sequence[LogitRow],
        num_drafts_R: Sequence[int],
        confidence: bool,
    ) -> Proposal:
        """As ``proposal.propose``."""
        ...

    def accept(
        self, *, logits_NV: Tensor, rows: Sequence[LogitRow], proposal: Proposal, widths: Sequence[int]
    ) -> list[Accepted]:
        """As ``rejection.accept`` of what ``process`` makes of the target's fp32 logits."""
        ...


class TorchSampling:
    """On any device."""

    propose = staticmethod(proposal.propose)

    def accept(
        self, *, logits_NV: Tensor, rows: Sequence[LogitRow], proposal: Proposal, widths: Sequence[int]
    ) -> list[Accepted]:
        return rejection.accept(dist=process(logits_NV, rows), rows=rows, proposal=proposal, widths=widths)
