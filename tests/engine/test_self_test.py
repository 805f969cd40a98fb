"""The self-test at load: a drafter that keeps its card's figure passes quietly, one that does not is reported."""

from __future__ import annotations

import logging
import shutil
from pathlib import Path

import pytest
from tests import fixtures
from tests.engine.zoo import Zoo, generate, greedy, tokens

from outrider.errors import CheckpointError
from outrider.models.drafter_card import DrafterCard, SelfTest, write_card

CARD = DrafterCard(
    target="cycle",
    selftest=SelfTest(
        prompts=(tuple(fixtures.orbit_prompt(9)), tuple(fixtures.orbit_prompt(33, first_generated_index=5))),
        max_tokens=33,
        accepted_length=8.0,
        floor=7.0,
    ),
)


def with_card(zoo: Zoo, drafter: str, directory: Path) -> str:
    shutil.copytree(zoo.path(drafter), directory)
    write_card(CARD, directory)
    return str(directory)


def messages(log: pytest.LogCaptureFixture, level: int) -> list[str]:
    return [r.getMessage() for r in log.records if r.levelno == level and "self-test" in r.getMessage()]


def test_a_drafter_that_keeps_its_figure_passes(zoo: Zoo, tmp_path: Path, log: pytest.LogCaptureFixture) -> None:
    llm = zoo.llm("cycle", with_card(zoo, "perfect", tmp_path / "d"))
    assert messages(log, logging.WARNING) == []
    assert messages(log, logging.INFO) == ["drafter self-test: accepted length 8.00 (the card says 8.00)"]
    stats = llm.stats()  # the test leaves no trace in the engine that serves
    assert (stats.steps_total, stats.spec.rounds, stats.generation_tokens_total) == (0, 0, 0)
    assert stats.kv_blocks_free == stats.kv_blocks_total
    output = generate(llm, [fixtures.orbit_prompt(33, first_generated_index=5)], greedy(33))[0]
    assert output.num_cached_tokens == 0
    assert output.spec.rounds == 4


@pytest.mark.parametrize("drafter", ["wrong", "half", "random"])
def test_a_drafter_below_its_floor_is_a_warning_and_still_serves(
    drafter: str, zoo: Zoo, tmp_path: Path, log: pytest.LogCaptureFixture
) -> None:
    llm = zoo.llm("cycle", with_card(zoo, drafter, tmp_path / "d"))
    (warning,) = messages(log, logging.WARNING)
    assert "below the floor 7.00 (the card says 8.00)" in warning
    assert tokens(generate(llm, [[5]], greedy(5))[0]) == fixtures.continuation([5], 5)


def test_the_test_can_be_switched_off(zoo: Zoo, tmp_path: Path, log: pytest.LogCaptureFixture) -> None:
    zoo.llm("cycle", with_card(zoo, "wrong", tmp_path / "d"), draft_self_test=False)
    assert messages(log, logging.WARNING) == messages(log, logging.INFO) == []


def test_prompts_beyond_the_context_limit_are_not_run(zoo: Zoo, tmp_path: Path, log: pytest.LogCaptureFixture) -> None:
    zoo.llm("cycle", with_card(zoo, "wrong", tmp_path / "d"), max_model_len=40)
    assert messages(log, logging.WARNING) == []
    assert "none of its prompts fits max_model_len=40" in messages(log, logging.INFO)[0]


def test_a_queue_shorter_than_the_card_is_no_obstacle(zoo: Zoo, tmp_path: Path, log: pytest.LogCaptureFixture) -> None:
    zoo.llm("cycle", with_card(zoo, "perfect", tmp_path / "d"), max_num_waiting=1)
    assert messages(log, logging.INFO) == ["drafter self-test: accepted length 8.00 (the card says 8.00)"]


def test_a_card_made_for_another_vocabulary_is_the_checkpoints_error(zoo: Zoo, tmp_path: Path) -> None:
    directory = with_card(zoo, "perfect", tmp_path / "d")
    other = SelfTest(prompts=((1, 64),), max_tokens=33, accepted_length=8.0, floor=7.0)
    write_card(DrafterCard(target="cycle", selftest=other), Path(directory))
    with pytest.raises(CheckpointError, match=r"selftest\.prompts does not fit the target: .*token id 64"):
        zoo.llm("cycle", directory)


def test_fewer_drafts_than_the_card_was_measured_with(zoo: Zoo, tmp_path: Path, log: pytest.LogCaptureFixture) -> None:
    """With 3 drafts no drafter can reach 7 tokens a round: that says nothing about it and must not be a warning."""
    zoo.llm("cycle", with_card(zoo, "perfect", tmp_path / "d"), 3)
    assert messages(log, logging.WARNING) == []
