"""The fixtures do what they claim, by transformers and the dense reference drafter."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tests import fixtures
from tests.reference_drafter import ReferenceDrafter, ReferenceTarget, reference_loop
from transformers import AutoTokenizer


def test_orbit_has_60_tokens_and_30_is_the_fixed_point() -> None:
    assert len(set(fixtures.ORBIT)) == 60
    assert fixtures.next_token(30) == 30
    assert 30 not in fixtures.ORBIT
    prompt = fixtures.orbit_prompt(13, first_generated_index=4)
    assert fixtures.continuation(prompt, 2) == list(fixtures.ORBIT[4:6])


@pytest.mark.parametrize("make", [fixtures.make_cycle_target, fixtures.make_layered_target])
def test_cycle_targets_follow_the_map_with_a_gap_of_8(make: object, tmp_path: Path) -> None:
    assert callable(make)
    target = ReferenceTarget(make(tmp_path))
    logits_TV, _ = target.run(range(fixtures.VOCAB), ())
    top2 = logits_TV.topk(2, dim=-1)
    assert top2.indices[:, 0].tolist() == [fixtures.next_token(t) for t in range(fixtures.VOCAB)]
    gap = top2.values[:, 0] - top2.values[:, 1]
    assert 7.9 < gap.min() <= gap.max() < 8.1


def test_layered_states_differ_from_layer_to_layer(tmp_path: Path) -> None:
    target = ReferenceTarget(fixtures.make_layered_target(tmp_path))
    _, features = target.run(range(fixtures.VOCAB), (-1, 0, 1, 2))
    for layer, states in enumerate(features.chunk(4, dim=-1)):
        expected = [fixtures.layered_state(t, layer) for t in range(fixtures.VOCAB)]
        assert torch.allclose(states, torch.eye(fixtures.HIDDEN)[expected], atol=1e-5)


def test_random_target_depends_on_all_of_its_context(tmp_path: Path) -> None:
    target = ReferenceTarget(fixtures.make_rand_target(tmp_path))
    first, _ = target.run([1, 2, 3, 4, 5], ())
    second, _ = target.run([9, 2, 3, 4, 5], ())
    assert (first[-1] - second[-1]).abs().max() > 0.05


def test_fixed_target_and_drafter_have_the_distribution_asked_for(tmp_path: Path) -> None:
    probabilities = {7: 0.1, 8: 0.6, 9: 0.3}
    target = ReferenceTarget(fixtures.make_fixed_target(tmp_path / "t", probabilities=probabilities))
    logits_TV, features_TF = target.run([1, 2, 3], fixtures.TARGET_LAYER_IDS)
    wanted = torch.tensor([0.1, 0.6, 0.3])
    assert torch.allclose(logits_TV.softmax(-1)[:, 7:10], wanted.expand(3, 3), atol=1e-5)
    path = fixtures.make_fixed_drafter(tmp_path / "d", probabilities=probabilities)
    _, rows_GV = ReferenceDrafter.load(path, target).propose(features_TF, 5)
    assert torch.allclose(rows_GV.softmax(-1)[:, 7:10], wanted.expand(7, 3), atol=1e-5)


@pytest.mark.parametrize(
    ("name", "gamma", "rounds"),
    [("perfect", 1, 32), ("perfect", 3, 16), ("perfect", 7, 8), ("wrong", 7, 64), ("half", 7, 16)],
)
@pytest.mark.parametrize("length", [1, 17])
def test_markov_drafters_take_the_rounds_of_the_cases(
    name: str, gamma: int, rounds: int, length: int, tmp_path: Path
) -> None:
    target = ReferenceTarget(fixtures.make_cycle_target(tmp_path / "target"))
    path = getattr(fixtures, f"make_{name}_drafter")(tmp_path / name)
    prompt = fixtures.orbit_prompt(length)
    run = reference_loop(target, ReferenceDrafter.load(path, target), prompt, max_tokens=65, gamma=gamma)
    assert run.token_ids == fixtures.continuation(prompt, 65)
    assert len(run.accepted) == rounds


@pytest.mark.parametrize(("lookback", "length"), [(8, 8), (7, 40), (8, 200), (40, 200)])
def test_context_drafter_is_right_from_features_alone(lookback: int, length: int, tmp_path: Path) -> None:
    target = ReferenceTarget(fixtures.make_layered_target(tmp_path / "target"))
    drafter = ReferenceDrafter.load(fixtures.make_context_drafter(tmp_path / "context", lookback=lookback), target)
    prompt = fixtures.orbit_prompt(length, first_generated_index=21)
    run = reference_loop(target, drafter, prompt, max_tokens=65, gamma=7)
    assert run.token_ids == fixtures.continuation(prompt, 65)
    assert run.accepted == [7] * 8


def test_context_drafter_notices_every_kind_of_shift(tmp_path: Path) -> None:
    target = ReferenceTarget(fixtures.make_layered_target(tmp_path / "target"))
    drafter = ReferenceDrafter.load(fixtures.make_context_drafter(tmp_path / "context"), target)
    sequence = fixtures.orbit_prompt(40)
    anchor, right = sequence[-1], fixtures.continuation(sequence, 7)
    _, features = target.run(sequence, fixtures.TARGET_LAYER_IDS)
    drafts, rows_GV = drafter.propose(features[:-1], anchor)
    top2 = rows_GV.topk(2).values
    assert drafts == right
    assert (top2[:, 0] - top2[:, 1]).min() > 10  # right at temperature 1 too

    def accepted(wrong_features: torch.Tensor, wrong_anchor: int = anchor) -> int:
        proposed, _ = drafter.propose(wrong_features, wrong_anchor)
        return sum(a == b for a, b in zip(proposed, right, strict=True))

    first, second = features[:-1].chunk(2, dim=-1)
    _, other_layers = target.run(sequence, (0, 1))
    assert accepted(features) == 0  # the anchor's own state in the context
    assert accepted(features[:-2]) == 0  # block one position early
    assert accepted(features[:-1].roll(1, 0)) == 0  # positions shifted
    assert accepted(torch.cat((second, first), dim=-1)) == 0  # taps swapped
    assert accepted(other_layers[:-1]) == 0  # a tap one layer off
    missing = features[:-1].clone()
    missing[-8:-4] = 0
    assert accepted(missing) <= 3 + 1  # rows never written


def test_random_drafters_of_every_head_type_propose(tmp_path: Path) -> None:
    target = ReferenceTarget(fixtures.make_rand_target(tmp_path / "target"))
    _, features = target.run([1, 2, 3, 4], fixtures.TARGET_LAYER_IDS)
    proposals = []
    for head_type in ("vanilla", "gated", "rnn"):
        path = fixtures.make_random_drafter(tmp_path / head_type, markov_head_type=head_type)
        proposals.append(ReferenceDrafter.load(path, target).propose(features, 5)[1])
    assert not torch.allclose(proposals[0], proposals[1])
    assert not torch.allclose(proposals[1], proposals[2])


def test_tokenizer_round_trips_text_and_renders_chats(tmp_path: Path) -> None:
    fixtures.write_tokenizer(tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    text = 'what is {"a": 1}?\n'
    token_ids = tokenizer.encode(text, add_special_tokens=False)
    assert len(token_ids) == len(text)
    assert tokenizer.decode(token_ids) == text
    assert tokenizer.encode("A%", add_special_tokens=False) == [0, fixtures.CHARACTERS.index("?")]
    assert len(tokenizer) == fixtures.VOCAB
    assert tokenizer.eos_token_id == fixtures.EOS_ID
    rendered = tokenizer.apply_chat_template(
        [{"role": "user", "content": "hi"}], add_generation_prompt=True, tokenize=False
    )
    assert rendered == "<|turn|>user\nhi\n<|turn|>assistant\n"
    assert tokenizer.encode(rendered, add_special_tokens=False)[0] == fixtures.TURN_ID
