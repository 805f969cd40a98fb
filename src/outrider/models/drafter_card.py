"""``card.json`` beside a drafter checkpoint: what it was trained on and how well it is known to draft.

A wrong drafter still gives right text, so the card carries a self-test that the engine repeats at load: greedy decoding
of a few prompts, whose accepted length must not fall below ``floor``. A checkpoint without a card, or with a card
without a self-test, is used without one. Keys this version does not know are kept out of the way: ignored when reading.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from outrider.errors import CheckpointError

CARD_FILE = "card.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class SelfTest:
    """Greedy decoding of ``prompts`` (token ids, so that no tokenizer or template can move the figure)."""

    prompts: tuple[tuple[int, ...], ...]
    max_tokens: int  # generated per prompt
    accepted_length: float  # measured when the card was written: emitted tokens / rounds, over all prompts
    floor: float  # below this the drafter is reported as broken

    def __post_init__(self) -> None:
        if not self.prompts or not all(self.prompts):
            raise CheckpointError("selftest.prompts must hold at least one prompt, and none may be empty")
        if self.max_tokens < 2:
            raise CheckpointError(f"selftest.max_tokens={self.max_tokens} must be at least 2, or no round is run")
        if not 1.0 <= self.floor <= self.accepted_length:
            raise CheckpointError(
                f"selftest.floor={self.floor} must lie in 1..{self.accepted_length} (selftest.accepted_length)"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class Measurement:
    """One measured accepted length, with the settings it holds for."""

    data: str  # name of the prompts
    prompts: int  # how many
    temperature: float
    max_tokens: int
    num_speculative_tokens: int
    accepted_length: float


@dataclass(frozen=True, slots=True, kw_only=True)
class DrafterCard:
    target: str  # name of the model it drafts for; "" if the checkpoint has no card
    measurements: tuple[Measurement, ...] = ()
    selftest: SelfTest | None = None  # None: no figure to hold it to
    training: Mapping[str, Any] = field(default_factory=dict)  # for people: config, data, steps, seed, wall time


def read_card(directory: Path) -> DrafterCard:
    """The card of the checkpoint in ``directory``; one without any figure if it has none."""
    path = directory / CARD_FILE
    try:
        raw = json.loads(path.read_text(encoding="utf-8"), parse_float=_finite, parse_constant=_finite)
    except FileNotFoundError:
        return DrafterCard(target="")
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{path}: not valid JSON ({error})") from error
    try:
        return _card(raw)
    except (CheckpointError, KeyError, TypeError, ValueError, OverflowError) as error:
        reason = f"{error} is missing" if isinstance(error, KeyError) else str(error)
        raise CheckpointError(f"{path}: malformed drafter card: {reason}") from error


def _finite(text: str) -> float:
    """NaN and infinity, which Python reads as JSON, are none and could not be printed again."""
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"{text} is not a finite number")
    return value


def write_card(card: DrafterCard, directory: Path) -> Path:
    path = directory / CARD_FILE
    path.write_text(json.dumps(asdict(card), indent=2) + "\n", encoding="utf-8")
    return path


def _card(raw: Any) -> DrafterCard:
    if not isinstance(raw, dict):
        raise CheckpointError(f"expected a JSON object, found {type(raw).__name__}")
    selftest, training = raw.get("selftest"), raw.get("training") or {}
    if not isinstance(training, dict):
        raise CheckpointError(f"training must be an object, found {type(training).__name__}")
    return DrafterCard(
        target=str(raw["target"]),
        measurements=tuple(_measurement(entry) for entry in raw.get("measurements") or ()),
        selftest=None if selftest is None else _selftest(selftest),
        training=training,
    )


def _measurement(raw: Any) -> Measurement:
    return Measurement(
        data=str(raw["data"]),
        prompts=int(raw["prompts"]),
        temperature=float(raw["temperature"]),
        max_tokens=int(raw["max_tokens"]),
        num_speculative_tokens=int(raw["num_speculative_tokens"]),
        accepted_length=float(raw["accepted_length"]),
    )


def _selftest(raw: Any) -> SelfTest:
    return SelfTest(
        prompts=tuple(tuple(int(token_id) for token_id in prompt) for prompt in raw["prompts"]),
        max_tokens=int(raw["max_tokens"]),
        accepted_length=float(raw["accepted_length"]),
        floor=float(raw["floor"]),
    )
