"""The equality benchmark on small models: it passes where drafting is right and can fail where it is not."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from benchmarks import equality
from tests import fixtures
from tests.engine.zoo import Zoo, generate, greedy


@pytest.fixture
def data(tmp_path: Path) -> str:
    path = tmp_path / "prompts.jsonl"
    lines = [json.dumps({"turns": [text, "ignored"]}) for text in ("abc abc", "what is 1 + 1?", "hello", "never read")]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return str(path)


def test_equal_texts_pass_and_the_last_line_is_json(data: str, zoo: Zoo, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = [
        "--data",
        data,
        "--model",
        str(zoo.path("cycle")),
        "--draft",
        str(zoo.path("half")),
        "--draft",
        "lookup",
    ]
    arguments += ["--num-prompts", "3", "--max-tokens", "12", "--max-num-seqs", "1", "--max-num-seqs", "3"]
    assert equality.main(arguments) == 0
    report = json.loads(capsys.readouterr().out.strip().splitlines()[-1])
    assert report["passed"] is True
    assert report["dtype"] == "float32"
    rows = report["comparisons"]
    assert [(row["draft"], row["max_num_seqs"]) for row in rows] == [
        (draft, seats) for seats in (1, 3) for draft in (str(zoo.path("half")), "lookup")
    ]
    for row in rows:
        assert (row["prompts"], row["identical"], row["differences"], row["largest_gap"]) == (3, 3, [], 0.0)
    assert rows[0]["accepted_length"] > 1.0


def test_another_text_is_found_with_the_references_gap(zoo: Zoo) -> None:
    reference = generate(zoo.llm("cycle"), [fixtures.orbit_prompt(5)], greedy(10, logprobs=2))[0]
    assert equality.first_difference(0, reference, reference) is None
    completion = reference.outputs[0]
    wrong = (*completion.token_ids[:6], 61, *completion.token_ids[7:])
    changed = replace(reference, outputs=(replace(completion, token_ids=wrong),))
    difference = equality.first_difference(4, reference, changed)
    assert difference is not None
    assert (difference.prompt, difference.position) == (4, 6)
    assert difference.reference_gap == pytest.approx(8.0, abs=0.1)
    short = replace(reference, outputs=(replace(completion, token_ids=completion.token_ids[:3]),))
    found = equality.first_difference(0, reference, short)
    assert found is not None
    assert found.position == 3
