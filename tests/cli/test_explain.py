"""``outrider explain`` prints the plan of case S1, and names what is wrong with a load it cannot plan."""

from __future__ import annotations

import json
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from outrider.cli.explain import explain_command
from outrider.cli.main import VERBS
from outrider.errors import ConfigError

S1 = ("--requests", "1,3,0,2", "--num-speculative-tokens", "6", "--max-num-seqs", "64")


def explain(*arguments: str) -> tuple[str, dict[str, Any]]:
    app = typer.Typer()
    app.command()(explain_command)
    result = CliRunner().invoke(app, [*arguments, "--json"])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    assert result.exit_code == 0, result.output
    *text, line = result.stdout.strip().splitlines()
    return "\n".join(text), json.loads(line)


def test_case_s1() -> None:
    text, report = explain(*S1)
    assert len(report["tiers"]) == 27
    assert report.keys() == {"tiers", "passes"}
    assert list(report["passes"]) == ["draft", "verify"]
    assert report["passes"]["draft"] == {
        "width": 6,
        "requests": [1, 3, 0, 2],
        "tokens": [6, 18, 0, 12],
        "non_padded_tokens": [6, 18, 0, 12],
        "padded_tokens": [24, 24, 24, 24],
        "lm_head_rows": [6, 18, 0, 12],
        "tier": 4,
        "padding": "tier",
    }
    verify = report["passes"]["verify"]
    assert (verify["width"], verify["tier"], verify["tokens"]) == (7, 4, [7, 21, 0, 14])
    assert verify["padded_tokens"] == [28] * 4
    assert "tier 4: the smallest captured even one that holds the 3 of rank 1" in text


def test_a_tier_is_padded_to_where_none_is_captured_between() -> None:
    report = explain("--requests", "1,9,0,2", "--num-speculative-tokens", "6", "--max-num-seqs", "64")[1]
    assert report["passes"]["draft"]["tier"] == 10
    assert report["passes"]["draft"]["padded_tokens"] == [60] * 4


def test_a_rank_that_prefills_leaves_the_others_their_tier() -> None:
    text, report = explain(*S1, "--prefill-tokens", "0,128,0,0")
    prefill = report["passes"]["prefill"]
    assert list(report["passes"]) == ["prefill", "draft", "verify"]
    assert (prefill["width"], prefill["tier"], prefill["padding"]) == (1, 0, "none")
    assert prefill["requests"] == prefill["lm_head_rows"] == [0, 1, 0, 0]
    assert prefill["tokens"] == prefill["padded_tokens"] == [0, 128, 0, 0]
    assert report["passes"]["draft"] == explain(*S1)[1]["passes"]["draft"]
    assert "no prefill pass is captured" in text


def test_eager_and_without_a_drafter() -> None:
    text, report = explain(*S1, "--enforce-eager")
    assert report["tiers"] == []
    assert report["passes"]["verify"]["padded_tokens"] == [7, 21, 0, 14]
    assert (report["passes"]["draft"]["tier"], report["passes"]["draft"]["padding"]) == (0, "none")
    assert "rank 0 has nothing captured" in text
    report = explain("--requests", "2,2", "--num-speculative-tokens", "0")[1]
    assert list(report["passes"]) == ["verify"]
    assert report["passes"]["verify"]["padded_tokens"] == [2, 2]


def test_nothing_to_do() -> None:
    text, report = explain("--requests", "0,0")
    assert report["passes"] == {}
    assert "no rank has work" in text


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--requests", "1,x"), "requests='1,x'"),
        (("--requests", ""), "requests=''"),
        (("--requests", "1,,2"), "requests='1,,2'"),
        (("--requests", "1,-3"), "requests='1,-3'"),
        (("--requests", "9" * 5000), "1 to 9 digits"),
        (("--requests", "65,1"), "rank 0 has 65 decoding, which exceeds max_num_seqs=64"),
        (("--requests", "1,64", "--prefill-tokens", "0,5"), "rank 1 has 64 decoding and 1 that prefills"),
        (("--requests", "1,2", "--prefill-tokens", "5"), "prefill_tokens=5 is of 1 ranks"),
        (("--requests", "1", "--prefill-tokens", "1.5"), "prefill_tokens='1.5'"),
        (("--requests", "1", "--max-num-seqs", "0"), "max_num_seqs=0"),
        (("--requests", "1", "--max-num-seqs", "100000000"), "max_num_seqs=100000000"),
        (("--requests", "1", "--num-speculative-tokens", "-1"), "num_speculative_tokens=-1"),
    ],
)
def test_bad_loads_are_named(arguments: tuple[str, ...], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        explain(*arguments)
    assert message in str(caught.value)


def test_it_is_a_verb() -> None:
    assert VERBS["explain"].attribute == explain_command.__name__
