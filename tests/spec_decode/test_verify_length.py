"""How many drafts are kept: a run of survivals above the threshold that never looks at the draft it judges."""

from __future__ import annotations

import math

import torch
from hypothesis import given
from hypothesis import strategies as st

from outrider.sampling.proposal import Proposal
from outrider.spec_decode.verify_length import choose_verify_lengths


def proposal(confidences: list[list[float]], num_drafts: list[int]) -> Proposal:
    logits = torch.tensor([[math.log(c / (1 - c)) for c in row] for row in confidences])
    return Proposal(tuple(tuple(range(n)) for n in num_drafts), (), None, logits)


def test_survival_is_the_product_of_confidences() -> None:
    confidences = [[0.9, 0.9, 0.9], [0.5, 0.999, 0.999], [0.99, 0.4, 0.99]]
    assert choose_verify_lengths(proposal(confidences, [3, 3, 3]), threshold=0.8) == [2, 0, 1]
    assert choose_verify_lengths(proposal(confidences, [1, 3, 0]), threshold=0.8) == [1, 0, 0]


def test_threshold_0_and_no_head_keep_everything() -> None:
    assert choose_verify_lengths(proposal([[0.01, 0.01]], [2]), threshold=0.0) == [2]
    assert choose_verify_lengths(Proposal.one_hot([(1, 2, 3), ()]), threshold=0.9) == [3, 0]


@given(
    st.lists(st.floats(0.01, 0.99), min_size=5, max_size=5),
    st.lists(st.floats(0.01, 0.99), min_size=5, max_size=5),
    st.integers(0, 5),
    st.floats(0.01, 1.0),
)
def test_keeping_a_draft_depends_on_its_own_and_earlier_slots_alone(
    confidences: list[float], others: list[float], shared: int, threshold: float
) -> None:
    """Two proposals that agree in their first slots keep the same of the drafts there."""
    changed = confidences[:shared] + others[shared:]
    first, second = (
        choose_verify_lengths(proposal([row], [5]), threshold=threshold)[0] for row in (confidences, changed)
    )
    assert min(first, shared) == min(second, shared)
    kept = next((j for j in range(5) if math.prod(confidences[: j + 1]) < threshold * (1 - 1e-6)), 5)
    assert first <= kept
