"""How many of its drafts a request verifies, from the confidence head.

Lossless because whether draft j is kept depends on the confidences of slots 1..j alone, which look at tokens before
draft j and never at it (dspark paper, appendix A: a cut that looks at the drafted token biases the output).
"""

from __future__ import annotations

from outrider.sampling.proposal import Proposal


def choose_verify_lengths(proposal: Proposal, *, threshold: float) -> list[int]:
    """Drafts kept per request: the longest run whose survival (product of confidences) stays at the threshold.

    threshold 0 keeps all of them, as does a proposer without a confidence head.
    """
    lengths = [len(drafts) for drafts in proposal.draft_ids]
    if threshold <= 0.0 or proposal.confidence_logits.shape[1] == 0:
        return lengths
    survival_RG = proposal.confidence_logits.double().sigmoid().cumprod(dim=1)
    kept = (survival_RG >= threshold).cumprod(dim=1).sum(dim=1).tolist()
    return [min(length, k) for length, k in zip(lengths, kept, strict=True)]
