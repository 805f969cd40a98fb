"""``outrider train`` from end to end on a tiny target: data, training, resuming, export, and what it refuses."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

import pytest
import torch
import typer
from tests.fixtures import make_rand_target
from typer.testing import CliRunner

from outrider.cli.train import train_command
from outrider.models.drafter_card import read_card
from outrider.models.drafter_checkpoint import load_drafter
from outrider.models.source import load_model
from outrider.train.data import TokenStore
from outrider.train.prompts import normalize
from outrider.train.recipe import stored_questions
from outrider.train.trainer import read_state

_SMALL = shlex.split(
    "--num-speculative-tokens 3 --target-layer-ids 0,1 --init-layer-ids 2,3 --markov-rank 6 --draft-vocab-size 60 "
    "--generate-tokens 4000 --lanes 4 --max-question-tokens 90 --max-answer-tokens 16 --own-question-share 0.5 "
    "--steps 6 --sequences 3 --anchors 5 --held-out 12 --checkpoint-every 3 --evaluate-tokens 8 --dtype float32 --json"
)


def _run(target: Path, output: Path, *extra: str) -> dict[str, object]:
    app = typer.Typer()
    app.command()(train_command)
    result = CliRunner().invoke(app, [str(target), "--output", str(output), *_SMALL, *extra])
    assert result.stdout, result.output
    summary: dict[str, object] = json.loads(result.stdout.splitlines()[-1])
    return {"exit": result.exit_code, **summary}


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_rand_target(tmp_path_factory.mktemp("target"))


def test_a_file_for_the_end_of_a_run_is_read_before_its_start(target: Path, tmp_path: Path) -> None:
    refused = _run(target, tmp_path / "run", "--evaluate-prompts", str(tmp_path / "absent.jsonl"))
    assert refused["exit"] == 1
    assert "evaluate-prompts: " in str(refused["error"])
    assert not (tmp_path / "run").exists()


def test_trains_exports_and_resumes(target: Path, tmp_path: Path) -> None:
    questions = tmp_path / "questions.jsonl"
    questions.write_text('{"turns": ["hello there"]}\n{"turns": ["who are you"]}\n')
    summary = _run(target, tmp_path / "run", "--evaluate-prompts", str(questions))
    assert summary["exit"] == 0, summary
    assert summary["steps"] == 6
    measurements = summary["measurements"]
    assert isinstance(measurements, list)
    assert [m["temperature"] for m in measurements] == [0.0, 1.0]
    assert all(1.0 <= m["accepted_length"] <= 4.0 for m in measurements)

    loaded = load_model(str(target))
    drafter = load_drafter(
        tmp_path / "run" / "drafter",
        target_config=loaded.config,
        embed_weight=loaded.model.embed_tokens.weight,
        lm_head_weight=loaded.model.lm_head.weight,
    )
    assert drafter.config.num_speculative_tokens == 3
    assert drafter.config.draft_vocab_size == 60
    assert torch.equal(drafter.model.lm_head.weight, loaded.model.lm_head.weight[drafter.model.draft_to_target_V])
    card = read_card(tmp_path / "run" / "drafter")
    assert card.selftest is not None
    assert card.selftest.floor <= card.selftest.accepted_length

    refused = _run(target, tmp_path / "run")
    assert refused["exit"] == 1
    assert "already holds a run" in str(refused["error"])
    changed = _run(target, tmp_path / "run", "--resume", "--learning-rate", "0.5")
    assert changed["exit"] == 1
    assert "training.learning_rate=0.001, not 0.5" in str(changed["error"])
    settings = json.loads((tmp_path / "run" / "run.json").read_text())
    answered_in = settings["settings"]["generation"].pop("quantization")
    (tmp_path / "run" / "run.json").write_text(json.dumps(settings))  # as a run from before there was a choice
    old = _run(target, tmp_path / "run", "--resume", "--quantization", "none")
    assert old["exit"] == 0, old
    settings["settings"]["generation"]["quantization"] = answered_in
    (tmp_path / "run" / "run.json").write_text(json.dumps(settings))
    if answered_in != "none":
        other = _run(target, tmp_path / "run", "--resume", "--quantization", "none")
        assert other["exit"] == 1
        assert f"generation.quantization={answered_in!r}, not 'none'" in str(other["error"])
    resumed = _run(target, tmp_path / "run", "--resume")
    assert resumed["exit"] == 0, resumed
    assert resumed["held_out"] == summary["held_out"]


def test_the_loss_is_made_as_asked_and_a_resumed_run_keeps_to_it(target: Path, tmp_path: Path) -> None:
    asked = ("--slot-decay", "1", "--ce-weight", "0.5", "--loss-columns", "40", "--feature-weight", "0.25")
    assert _run(target, tmp_path / "run", *asked)["exit"] == 0
    made = json.loads((tmp_path / "run" / "run.json").read_text())["settings"]["training"]
    assert [made[key] for key in ("slot_decay", "ce", "loss_columns", "feature")] == [1.0, 0.5, 40, 0.25]
    for option, message in (("--ce-weight", "training.ce=0.5, not 0.0"), ("--slot-decay", "training.slot_decay=1.0")):
        kept = [part for i in range(0, len(asked), 2) if asked[i] != option for part in asked[i : i + 2]]
        refused = _run(target, tmp_path / "run", "--resume", *kept)
        assert refused["exit"] == 1
        assert message in str(refused["error"])


@pytest.mark.parametrize(
    ("option", "value", "message"),
    [
        ("--target-layer-ids", "0,4", "0..3"),
        ("--temperatures", "warm", "temperatures"),
        ("--held-out", "5000", "held_out=5000"),
        ("--exclude-prompts", "/does/not/exist", "exclude-prompts"),
        ("--max-answer-tokens", "4000", "max_position_embeddings"),
    ],
)
def test_refuses(target: Path, tmp_path: Path, option: str, value: str, message: str) -> None:
    refused = _run(target, tmp_path / "run", option, value)
    assert refused["exit"] == 1
    assert message in str(refused["error"])


def test_a_grown_store_keeps_questions_and_draft_vocabulary(target: Path, tmp_path: Path) -> None:
    """More data after training began: no question comes twice, and the trained rows keep their meaning."""
    output = tmp_path / "run"
    assert _run(target, output)["exit"] == 0
    state = read_state(output / "state.pt")
    store, loaded = TokenStore.open(output / "data"), load_model(str(target))
    questions = [normalize(text) for text in stored_questions(store, loaded)]
    assert len(questions) == len(set(questions)) == len(store.spans)
    store.tokens_C[: store.used] = 7  # other data would now choose another vocabulary
    assert _run(target, output, "--resume")["exit"] == 0
    resumed = read_state(output / "state.pt")
    assert torch.equal(resumed["draft_to_target"], state["draft_to_target"])
    (output / "state.pt").write_bytes(b"not a state")
    refused = _run(target, output, "--resume")
    assert refused["exit"] == 1
    assert "state.pt cannot be read" in str(refused["error"])
