"""The store's round trip and bounds, anchors' invariants, and the questions that may be trained on."""

from __future__ import annotations

import re
from itertools import islice
from pathlib import Path
from random import Random

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from outrider.errors import ConfigError
from outrider.train.anchors import BatchPlan, build_batch, choose_anchors, valid_anchors
from outrider.train.data import SequenceRows, StoreShape, TokenStore
from outrider.train.prompts import TEMPLATES, FileQuestions, QuestionFilter, TemplatedQuestions, fill, read_excluded

_SLOTS = 3


def _rows(length: int, prompt: int, *, seed: int = 0) -> SequenceRows:
    generator = torch.Generator().manual_seed(seed)
    return SequenceRows(
        tokens_N=torch.randint(0, 50, (length,), generator=generator),
        answer_N=torch.arange(length) >= prompt,
        taps_NF=torch.randn(length, 8, generator=generator).bfloat16(),
        hidden_ND=torch.randn(length, 4, generator=generator).bfloat16(),
        lse_N=torch.randn(length, generator=generator),
        temperature=0.7 * (seed % 2),
    )


@pytest.fixture
def store(tmp_path: Path) -> TokenStore:
    made = TokenStore.create(tmp_path / "data", StoreShape(capacity=100, tap_width=8, hidden_size=4))
    for seed, (length, prompt) in enumerate(((12, 5), (9, 7), (20, 3), (4, 2), (30, 10))):
        assert made.append(_rows(length, prompt, seed=seed))
    made.flush()
    return made


def test_store_round_trip_and_bound(store: TokenStore) -> None:
    assert not store.append(_rows(26, 3))  # 75 of 100 rows are used
    assert store.used == 75
    opened = TokenStore.open(store.folder)
    assert opened.spans == store.spans
    assert opened.shape == store.shape
    for seed, span in enumerate(opened.spans):
        rows, cut = _rows(span.stop - span.start, 0, seed=seed), slice(span.start, span.stop - 1)
        assert torch.equal(opened.tokens_C[span.start : span.stop].long(), rows.tokens_N)
        assert torch.equal(opened.taps_CF[cut], rows.taps_NF[:-1])
        assert torch.equal(opened.hidden_CD[cut], rows.hidden_ND[:-1])
        assert torch.equal(opened.lse_C[cut], rows.lse_N[:-1])
        assert not opened.taps_CF[span.stop - 1].any()
        assert opened.lse_C[span.stop - 1] == torch.inf
    assert opened.answer_tokens == 7 + 2 + 17 + 2 + 20
    with pytest.raises(ConfigError, match="already holds"):
        TokenStore.create(store.folder, store.shape)
    with pytest.raises(ConfigError, match=r"index\.json"):
        TokenStore.open(store.folder / "absent")


@given(count=st.integers(1, 30), total=st.integers(1, 30), seed=st.integers(0, 99))
def test_chosen_anchors_are_distinct_sorted_and_bounded(count: int, total: int, seed: int) -> None:
    positions = torch.arange(total) * 2 + 5
    chosen = choose_anchors(positions, count, torch.Generator().manual_seed(seed)).tolist()
    assert len(chosen) == min(count, total)
    assert chosen == sorted(set(chosen))
    assert set(chosen) <= set(positions.tolist())


def test_batches_hold_what_the_slots_are_about(store: TokenStore) -> None:
    spans = store.spans
    chosen = [valid_anchors(store, span) for span in spans]
    for span, anchors in zip(spans, chosen, strict=True):
        assert store.answer_C[span.start + anchors].all()
        assert int(anchors.max()) == span.stop - span.start - 2  # the last token has no successor
    batch = build_batch(store, spans, chosen, num_slots=_SLOTS)
    width = batch.anchor_ids_BA.shape[1]
    assert {span.temperature == 0 for span in spans} == {True, False}
    for slot, row, label, greedy in zip(
        batch.slot_N.tolist(),
        batch.teacher_row_N.tolist(),
        batch.next_N.tolist(),
        batch.greedy_N.tolist(),
        strict=True,
    ):
        sequence, anchor, k = slot // (width * _SLOTS), slot // _SLOTS % width, slot % _SLOTS
        assert batch.real_BA[sequence, anchor]
        span, position = spans[sequence], int(batch.anchor_positions_BA[sequence, anchor])
        at = span.start + position + k
        assert at + 1 < span.stop
        assert label == store.tokens_C[at + 1]
        assert greedy == (span.temperature == 0)
        assert batch.previous_BAG[sequence, anchor, k] == store.tokens_C[at]
        assert torch.equal(batch.hidden_UD[row], store.hidden_CD[at])
        assert batch.lse_U[row] == store.lse_C[at]
        seen = batch.visible_BAC[sequence, anchor].nonzero()[:, 0]
        assert seen.tolist() == list(range(position))
        assert torch.equal(batch.taps_BCF[sequence, seen], store.taps_CF[span.start : span.start + position])
    expected = sum(
        min(_SLOTS, span.stop - span.start - 1 - int(a)) for span, c in zip(spans, chosen, strict=True) for a in c
    )
    assert len(batch.slot_N) == expected
    # What sizes are rounded up with: teacher rows that nobody asks and that give every token probability 0.
    asked = int(batch.teacher_row_N.max()) + 1
    assert asked == len(set(batch.teacher_row_N.tolist()))
    assert batch.lse_U[asked:].isinf().all()
    assert not batch.hidden_UD[asked:].any()


def test_plan_depends_on_seed_and_step_alone(store: TokenStore) -> None:
    def plan(seed: int) -> BatchPlan:
        return BatchPlan(store, store.spans, batch=2, anchors=3, seed=seed)

    first, second, other = plan(1), plan(1), plan(2)
    for step in (5, 0, 3):
        a, b = first.at(step, num_slots=_SLOTS), second.at(step, num_slots=_SLOTS)
        assert torch.equal(a.anchor_positions_BA, b.anchor_positions_BA)
        assert torch.equal(a.taps_BCF, b.taps_BCF)
    firsts = [first.at(step, num_slots=_SLOTS).next_N.tolist() for step in range(6)]
    assert firsts != [other.at(step, num_slots=_SLOTS).next_N.tolist() for step in range(6)]


def test_questions_cover_every_template_without_gaps() -> None:
    questions = list(islice(TemplatedQuestions(seed=3), 4000))
    assert questions == list(islice(TemplatedQuestions(seed=3), 4000))
    assert not any("{" in question or "}" in question for question in questions)
    starts = {template.split("{")[0] for templates in TEMPLATES.values() for template in templates}
    assert all(any(question.startswith(start) for question in questions) for start in starts if len(start) > 8)


def test_given_questions_are_asked_once_each_before_templated_ones(tmp_path: Path) -> None:
    first, second = tmp_path / "a.jsonl", tmp_path / "b.txt"
    first.write_text('{"turns": ["What is tea?", "And coffee?"]}\n{"question": "Who was Ada?"}\n')
    second.write_text("Why is the sky blue?\n\n")
    questions = list(islice(FileQuestions([first, second], seed=5), 8))
    assert set(questions[:3]) == {"What is tea?", "Who was Ada?", "Why is the sky blue?"}
    assert questions[3:] == list(islice(TemplatedQuestions(seed=5), 5))
    assert list(islice(FileQuestions([], seed=5), 5)) == questions[3:]
    second.write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigError, match=r"questions: .*b\.txt cannot be read \(not UTF-8\)"):
        FileQuestions([second], seed=5)
    second.write_text('fine\n{"answer": 1}\n')
    with pytest.raises(ConfigError, match=r"questions: question 2 of .*b\.txt has no turns, prompt or question"):
        FileQuestions([second], seed=5)


def test_a_template_never_gets_the_same_word_twice() -> None:
    text = fill(
        "{place} or {place}? Ask {name} of {thing}.", Random(1), lambda field: "Oz" if field == "place" else None
    )
    assert text.count("Oz") == 1
    assert not re.search(r"[{}]", text)


def test_excluded_questions_are_refused_whatever_their_spelling(tmp_path: Path) -> None:
    file = tmp_path / "eval.jsonl"
    file.write_text(
        '{"turns": ["Tell me about Lisbon.", "And Porto?"]}\n{"prompt": "def add(a, b):"}\nplain question here\n'
    )
    questions = QuestionFilter(read_excluded([file]))
    assert not questions.admit("tell me  about LISBON")
    assert not questions.admit("And Porto")
    assert not questions.admit("def add(a,b)")
    assert not questions.admit("Plain question, here?")
    assert questions.admit("Tell me about Porto.")
    assert not questions.admit("Tell me about Porto!")
    assert not questions.admit("Hi")
    assert questions.refused == {"excluded": 4, "repeated": 1, "fragment": 1}
    with pytest.raises(ConfigError, match="absent"):
        read_excluded([tmp_path / "absent"])
