"""Walking a block: what each slot sees, what is recorded, and the sequential heads' inputs."""

from __future__ import annotations

import pytest
import torch
from tests.sampling.helpers import TableDrafter, make_state, verify_rows
from torch import Tensor

from outrider.sampling.processors import process
from outrider.sampling.proposal import Proposal, columns_of_ids, propose
from outrider.sampling.random import Role
from outrider.sampling.sampler import draw, row_uniforms
from outrider.sampling.state import LogitRow, SequenceState

VOCAB = 10


def random_drafter(draft_to_target: list[int] | None = None) -> TableDrafter:
    generator = torch.Generator().manual_seed(11)
    ids = torch.arange(VOCAB) if draft_to_target is None else torch.tensor(draft_to_target)
    return TableDrafter(
        bias_VVd=torch.randn(VOCAB, len(ids), generator=generator) * 2,
        draft_to_target_V=ids,
        confidence_V=torch.randn(VOCAB, generator=generator),
    )


def block(num_requests: int, num_slots: int, num_columns: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(12)
    base = torch.randn(num_requests, num_slots, num_columns, generator=generator)
    return base, torch.randn(num_requests, num_slots, 3, generator=generator)


def run(
    drafter: TableDrafter, states: list[SequenceState], num_drafts: list[int], *, num_slots: int = 4
) -> tuple[Proposal, Tensor, Tensor]:
    base, hidden = block(len(states), num_slots, drafter.draft_to_target_V.shape[0])
    proposal = propose(
        drafter=drafter,
        base_logits_RGV=base,
        hidden_RGD=hidden,
        anchor_ids_R=torch.arange(len(states)),
        rows=[verify_rows(state)[0] for state in states],
        num_drafts_R=num_drafts,
        confidence=True,
    )
    return proposal, base, hidden


@pytest.mark.parametrize("draft_to_target", [None, [7, 1, 4, 2, 9, 0]])
@pytest.mark.parametrize("params", [{}, {"temperature": 0.7, "top_k": 3}, {"frequency_penalty": 1.0, "top_p": 0.9}])
def test_each_slot_is_drawn_from_its_recorded_distribution(
    draft_to_target: list[int] | None, params: dict[str, float]
) -> None:
    """Replayed slot by slot: previous token, prefix, position, role and the map to target ids."""
    drafter = random_drafter(draft_to_target)
    states = [make_state(seed=seed, prompt=[3, 5], output=[seed], **params) for seed in range(3)]
    proposal, base, hidden = run(drafter, states, [4, 2, 3])
    assert [len(ids) for ids in proposal.draft_ids] == [4, 2, 3]
    assert len(proposal.q_steps) == 4
    column_of_id = columns_of_ids(drafter.draft_to_target_V)
    for r, state in enumerate(states):
        previous = r
        prefix: tuple[int, ...] = ()
        for k, drafted in enumerate(proposal.draft_ids[r]):
            row = LogitRow(state, prefix, 3 + k, 2)
            logits = base[r, k] + drafter.bias_VVd[previous]
            q_1V = process(logits[None], [row], column_of_id=column_of_id).probs_NV
            torch.testing.assert_close(proposal.q_steps[k][r], q_1V[0])
            column = int(draw(q_1V, row_uniforms([row], Role.PROPOSE)))
            assert drafted == int(drafter.draft_to_target_V[column])
            expected_confidence = drafter.confidence_V[previous] + hidden[r, k, 0]
            assert proposal.confidence_logits[r, k] == pytest.approx(expected_confidence.item())
            previous, prefix = drafted, (*prefix, drafted)
    assert (proposal.draft_to_target is None) == (draft_to_target is None)


def test_greedy_requests_draft_the_argmax_and_record_nothing() -> None:
    drafter = random_drafter()
    proposal, base, _ = run(drafter, [make_state(temperature=0)] * 2, [4, 4])
    assert proposal.q_steps == ()
    for r, ids in enumerate(proposal.draft_ids):
        previous = r
        for k, drafted in enumerate(ids):
            assert drafted == int((base[r, k] + drafter.bias_VVd[previous]).argmax())
            previous = drafted


def test_banned_tokens_are_not_drafted_before_min_tokens() -> None:
    drafter = TableDrafter.flat(VOCAB)
    base = torch.zeros(1, 4, VOCAB)
    base[..., 2] = 9.0  # end of sequence
    base[..., 6] = 5.0
    proposal = propose(
        drafter=drafter,
        base_logits_RGV=base,
        hidden_RGD=torch.zeros(1, 4, 3),
        anchor_ids_R=torch.tensor([0]),
        rows=verify_rows(make_state(temperature=0, min_tokens=3, output=[1])),
        num_drafts_R=[4],
        confidence=False,
    )
    assert proposal.draft_ids == ((6, 6, 2, 2),)
    assert proposal.confidence_logits.shape == (1, 0)


def test_drafts_do_not_depend_on_batch_mates_or_depth() -> None:
    drafter = random_drafter()
    states = [make_state(seed=0), make_state(seed=1, temperature=0), make_state(seed=2, presence_penalty=0.5)]
    together, _, _ = run(drafter, states, [4, 4, 4])
    shallow, _, _ = run(drafter, states, [1, 3, 2])
    assert shallow.draft_ids == tuple(ids[:n] for ids, n in zip(together.draft_ids, [1, 3, 2], strict=True))
    base, hidden = block(3, 4, VOCAB)
    for r, state in enumerate(states):
        alone = propose(
            drafter=drafter,
            base_logits_RGV=base[r : r + 1],
            hidden_RGD=hidden[r : r + 1],
            anchor_ids_R=torch.tensor([r]),
            rows=verify_rows(state),
            num_drafts_R=[4],
            confidence=False,
        )
        assert alone.draft_ids[0] == together.draft_ids[r]


def test_no_drafts_asked_for() -> None:
    proposal, _, _ = run(random_drafter(), [make_state(), make_state()], [0, 0])
    assert proposal.draft_ids == ((), ())
    assert proposal.q_steps == ()
    assert Proposal.one_hot([[1, 2], []]).draft_ids == ((1, 2), ())


def test_inverse_of_a_draft_vocabulary() -> None:
    assert columns_of_ids(torch.tensor([5, 0, 2])).tolist() == [1, -1, 2, -1, -1, 0]
