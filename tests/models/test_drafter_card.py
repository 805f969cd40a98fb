"""The drafter card: round trip, tolerance, and refusal of figures that cannot be held to."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from outrider.errors import CheckpointError
from outrider.models.drafter_card import DrafterCard, Measurement, SelfTest, read_card, write_card

CARD = DrafterCard(
    target="smollm2-135m",
    measurements=(
        Measurement(
            data="mt-bench first turns",
            prompts=80,
            temperature=0.0,
            max_tokens=128,
            num_speculative_tokens=5,
            accepted_length=2.1,
        ),
    ),
    selftest=SelfTest(prompts=((1, 2, 3), (4,)), max_tokens=32, accepted_length=2.2, floor=1.7),
    training={"steps": 100, "seed": 0},
)


def test_cards_survive_writing_and_reading(tmp_path: Path) -> None:
    write_card(CARD, tmp_path)
    assert read_card(tmp_path) == CARD


def test_no_card_means_no_figure(tmp_path: Path) -> None:
    assert read_card(tmp_path) == DrafterCard(target="")


def test_unknown_keys_are_ignored(tmp_path: Path) -> None:
    path = write_card(CARD, tmp_path)
    path.write_text(json.dumps(json.loads(path.read_text(encoding="utf-8")) | {"later": 1}), encoding="utf-8")
    assert read_card(tmp_path) == CARD


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"target": None, "selftest": {"prompts": [[1]]}}, "max_tokens"),
        ({"selftest": {"prompts": [[1]], "max_tokens": 8, "accepted_length": 2.0, "floor": 2.5}}, "floor=2.5"),
        ({"selftest": {"prompts": [], "max_tokens": 8, "accepted_length": 2.0, "floor": 1.5}}, "prompts"),
        ({"selftest": {"prompts": [[1]], "max_tokens": 1, "accepted_length": 2.0, "floor": 1.5}}, "max_tokens=1"),
        ({"selftest": {"prompts": [["a"]], "max_tokens": 8, "accepted_length": 2.0, "floor": 1.5}}, "'a'"),
        ({"measurements": [{"data": "x"}]}, "prompts"),
        ({"training": [1]}, "training"),
        ({"selftest": {"prompts": [[1]], "max_tokens": 8, "accepted_length": 10**400, "floor": 1}}, "too large"),
    ],
)
def test_malformed_cards_are_clear_errors(change: dict[str, Any], word: str, tmp_path: Path) -> None:
    (tmp_path / "card.json").write_text(json.dumps({"target": "m"} | change), encoding="utf-8")
    with pytest.raises(CheckpointError, match=r"card\.json.*malformed") as caught:
        read_card(tmp_path)
    assert word in str(caught.value)


@pytest.mark.parametrize("number", ["NaN", "-Infinity", "1e999"])
def test_numbers_that_could_not_be_printed_again_are_refused(number: str, tmp_path: Path) -> None:
    (tmp_path / "card.json").write_text(f'{{"target": "m", "training": {{"loss": {number}}}}}', encoding="utf-8")
    with pytest.raises(CheckpointError, match=f"{number} is not a finite number"):
        read_card(tmp_path)


def test_a_card_without_a_target_is_refused(tmp_path: Path) -> None:
    (tmp_path / "card.json").write_text("{}", encoding="utf-8")
    with pytest.raises(CheckpointError, match="'target' is missing"):
        read_card(tmp_path)
