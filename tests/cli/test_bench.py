"""``outrider bench``: the JSON line of each command, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tests import fixtures
from typer.testing import CliRunner, Result

from outrider.bench.contenders import Contenders
from outrider.bench.http_server import serving
from outrider.cli.bench import bench_app
from outrider.config import EngineArgs
from outrider.errors import ConfigError, InvalidRequestError, OutriderError

ACCEPTANCE_KEYS = {
    "rounds", "offered", "accepted", "emitted", "accepted_length", "per_position", "acceptance_rate", "ci95",
    "per_prompt", "num_prompts", "output_tokens",
}  # fmt: skip
SPREAD_KEYS = {"median", "min", "max"}
DISTRIBUTION_KEYS = {"mean", "p50", "p99", "min", "max"}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(fixtures.make_cycle_target(tmp_path_factory.mktemp("model")))


@pytest.fixture(scope="module")
def drafter(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(fixtures.make_perfect_drafter(tmp_path_factory.mktemp("drafter")))


@pytest.fixture
def data(tmp_path: Path) -> str:
    path = tmp_path / "prompts.jsonl"
    path.write_text("".join(f'{{"turns": ["prompt {i}"]}}\n' for i in range(2)), encoding="utf-8")
    return str(path)


def _invoke(*arguments: str) -> Result:
    result = CliRunner().invoke(bench_app, list(arguments))
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result


def _bench(*arguments: str) -> dict[str, Any]:
    result = _invoke(*arguments, "--json")
    assert result.exit_code == 0, result.output
    report: dict[str, Any] = json.loads(result.stdout.strip().splitlines()[-1])
    return report


def _refused(error: type[OutriderError], match: str, *arguments: str) -> None:
    with pytest.raises(error, match=match):
        _invoke(*arguments)


# ---- acceptance


def test_acceptance_of_a_perfect_drafter(model: str, drafter: str, data: str) -> None:
    report = _bench(
        "acceptance", model, "--draft", drafter, "--data", data, "--limit", "2", "--max-tokens", "17", "--ignore-eos"
    )
    assert report.keys() == ACCEPTANCE_KEYS | {"benchmark", "lookup", "data", "peak_rss_bytes", "settings"}
    assert report["lookup"].keys() == ACCEPTANCE_KEYS
    assert (report["accepted_length"], report["ci95"], report["acceptance_rate"]) == (8.0, [8.0, 8.0], 1.0)
    assert (report["rounds"], report["emitted"], report["num_prompts"]) == (4, 32, 2)
    assert report["per_position"] == [[4, 4]] * 7
    assert report["per_prompt"] == {"median": 8.0, "min": 8.0, "max": 8.0}
    assert report["lookup"]["emitted"] == 32
    assert 1.0 <= report["lookup"]["accepted_length"] < 2.0
    (only,) = report["data"]
    assert only == {"data": data} | {key: report[key] for key in ACCEPTANCE_KEYS | {"lookup"}}
    settings = report["settings"]
    assert (settings["model"], settings["draft"], settings["num_speculative_tokens"]) == (model, drafter, 7)
    assert (settings["temperature"], settings["max_tokens"], settings["num_requests"]) == (0.0, 17, 2)
    assert settings["threads"] >= 1


def test_acceptance_sampled_over_several_data_sets(model: str, drafter: str, data: str, tmp_path: Path) -> None:
    """CYCLE leads by 8 logits: sampling at 1 nearly always takes its token. A seed belongs to a prompt of a file."""
    other = tmp_path / "other.jsonl"
    other.write_text(Path(data).read_text(encoding="utf-8"), encoding="utf-8")
    report = _bench(
        "acceptance", model, "--draft", drafter, "--data", data, "--data", str(other), "--temperature", "1",
        "--max-tokens", "9", "--num-speculative-tokens", "3", "--raw", "--ignore-eos",
    )  # fmt: skip
    first, second = report["data"]
    assert (first.pop("data"), second.pop("data")) == (data, str(other))
    assert first == second
    assert report["rounds"] == 2 * first["rounds"]
    assert report["accepted_length"] == first["accepted_length"]
    assert 2.0 < report["accepted_length"] <= 4.0
    assert len(report["per_position"]) == 3
    assert len(report["lookup"]["per_position"]) <= 3
    assert report["settings"]["raw"]


def test_acceptance_of_lookup_alone(model: str, data: str) -> None:
    report = _bench("acceptance", model, "--draft", "lookup", "--data", data, "--max-tokens", "9")
    assert report["lookup"] == {key: report[key] for key in ACCEPTANCE_KEYS}
    assert report["settings"]["proposer"] == "lookup"


def test_acceptance_needs_drafts_and_data(model: str, data: str) -> None:
    _refused(ConfigError, "draft='auto': no drafter is bundled", "acceptance", model, "--data", data)
    _refused(ConfigError, "draft='none' proposes no drafts", "acceptance", model, "--data", data, "--draft", "none")
    _refused(ConfigError, "data is missing", "acceptance", model, "--draft", "lookup")
    _refused(ConfigError, "names a file twice", "acceptance", model, "--data", data, "--data", data)


def test_wrong_files_and_limits_are_named(model: str, data: str, tmp_path: Path) -> None:
    lookup = ("acceptance", model, "--draft", "lookup", "--data")
    _refused(ConfigError, r"none\.jsonl cannot be read", *lookup, str(tmp_path / "none.jsonl"))
    _refused(ConfigError, "limit=0 must be at least 1", *lookup, data, "--limit", "0")
    bad = tmp_path / "bad.jsonl"
    bad.write_text('{"turns": ["fine"]}\n{"turns": []}\n', encoding="utf-8")
    _refused(ConfigError, r"bad\.jsonl, line 2", *lookup, str(bad))
    _refused(InvalidRequestError, "temperature=-1", *lookup, data, "--temperature", "-1")


# ---- latency and throughput


def _check_modes(report: dict[str, Any], *, requests: int, tokens: int) -> None:
    assert list(report["modes"]) == ["dspark", "lookup", "none"]
    for name, mode in report["modes"].items():
        assert (mode["num_requests"], mode["num_tokens"]) == (requests, tokens), name
        for key in ("requests_per_s", "output_tokens_per_s", "decode_tokens_per_s"):
            assert mode[key].keys() == SPREAD_KEYS
            assert 0 < mode[key]["min"] <= mode[key]["median"] <= mode[key]["max"]
        for key in ("ttft_s", "tpot_s", "e2e_s"):
            assert mode[key].keys() == DISTRIBUTION_KEYS
            assert 0 < mode[key]["min"] <= mode[key]["p50"] <= mode[key]["p99"] <= mode[key]["max"]
        assert mode["accepted_length"] == mode["spec"]["accepted_length"]
    assert report["modes"]["dspark"]["accepted_length"] == 8.0
    assert report["modes"]["none"]["accepted_length"] == 1.0
    assert list(report["ratios"]) == ["dspark_over_none", "dspark_over_lookup", "lookup_over_none"]
    for ratio in report["ratios"].values():
        assert ratio.keys() == {"output_tokens_per_s", "decode_tokens_per_s"}
        assert 0 < ratio["output_tokens_per_s"]["min"] <= ratio["output_tokens_per_s"]["max"]
    assert report["peak_rss_bytes"] > 10 * 2**20


def test_latency(model: str, drafter: str) -> None:
    report = _bench(
        "latency", model, "--draft", drafter, "--prompt", "abc", "--prompt", "hello there", "--output-len", "9",
        "--repeat", "2", "--ignore-eos",
    )  # fmt: skip
    assert report["benchmark"] == "latency"
    _check_modes(report, requests=4, tokens=4 * 9)
    assert report["equal_output"] == {"compared": 4, "equal": {"dspark": 4, "lookup": 4}}
    assert (report["settings"]["repeat"], report["settings"]["enable_prefix_caching"]) == (2, False)


def test_latency_sampled_on_random_tokens(model: str, drafter: str) -> None:
    report = _bench(
        "latency", model, "--draft", drafter, "--input-len", "40", "--output-len", "2", "--repeat", "1",
        "--temperature", "1", "--ignore-eos",
    )  # fmt: skip
    assert report["equal_output"] is None
    assert report["settings"]["input_tokens"] == 40 * report["settings"]["num_requests"]


def test_latency_without_a_drafter_still_compares_lookup(model: str) -> None:
    report = _bench("latency", model, "--prompt", "abc", "--output-len", "4", "--repeat", "1")
    assert list(report["modes"]) == ["lookup", "none"]
    assert list(report["ratios"]) == ["lookup_over_none"]


def test_throughput(model: str, drafter: str, data: str) -> None:
    report = _bench(
        "throughput", model, "--draft", drafter, "--data", data, "--num-prompts", "3", "--max-concurrency", "2",
        "--output-len", "9", "--ignore-eos",
    )  # fmt: skip
    assert report["benchmark"] == "throughput"
    _check_modes(report, requests=3, tokens=27)
    assert report["equal_output"] == {"compared": 3, "equal": {"dspark": 3, "lookup": 3}}
    settings = report["settings"]
    assert (settings["max_concurrency"], settings["request_rate"], settings["http"]) == (2, None, False)


def test_throughput_over_http_with_poisson_arrivals(model: str, drafter: str, data: str) -> None:
    report = _bench(
        "throughput", model, "--draft", drafter, "--data", data, "--request-rate", "100", "--output-len", "9",
        "--ignore-eos", "--http",
    )  # fmt: skip
    _check_modes(report, requests=2, tokens=18)
    assert report["equal_output"] is None
    assert (report["settings"]["request_rate"], report["settings"]["http"]) == (100.0, True)


def test_throughput_of_a_running_server(model: str, drafter: str, data: str) -> None:
    core = Contenders.load(EngineArgs(model=model, draft=drafter)).build("dspark", num_kv_tokens=1)
    with serving(core, "cycle") as target:
        report = _bench(
            "throughput", "--base-url", f"{target.base_url}/v1", "--data", data, "--output-len", "9", "--ignore-eos"
        )
    assert list(report["modes"]) == ["server"]
    assert report["modes"]["server"]["num_tokens"] == 18
    assert report["modes"]["server"]["accepted_length"] == 8.0
    assert (report["ratios"], report["peak_rss_bytes"]) == ({}, None)


def test_what_does_not_go_together_is_refused(model: str, data: str) -> None:
    _refused(ConfigError, "repeat=0", "latency", model, "--repeat", "0")
    _refused(ConfigError, "limit=3", "latency", model, "--limit", "3")
    _refused(ConfigError, "input_len=5", "latency", model, "--input-len", "5", "--data", data)
    _refused(ConfigError, "prompt='' is empty", "latency", model, "--prompt", "")
    _refused(ConfigError, "max_concurrency=0", "throughput", model, "--max-concurrency", "0")
    _refused(ConfigError, "num_prompts=-1", "throughput", model, "--num-prompts", "-1")
    _refused(ConfigError, "request_rate=0", "throughput", model, "--request-rate", "0")
    _refused(ConfigError, "input_len=5 needs a vocabulary", "throughput", "--base-url", "http://x", "--input-len", "5")
    _refused(InvalidRequestError, "max_tokens=0", "throughput", model, "--output-len", "0")
    _refused(ConfigError, "so max_num_seqs, draft would have no effect", "throughput", "--base-url", "http://x",
             "--draft", "none", "--max-num-seqs", "2")  # fmt: skip
    _refused(ConfigError, "api_key is for base_url", "throughput", model, "--api-key", "k")


def test_the_help_lists_the_commands() -> None:
    output = _invoke("--help").output
    for name in ("acceptance", "latency", "throughput"):
        assert name in output


def test_a_context_limit_that_was_asked_for_fits_the_small_memory(tmp_path: Path) -> None:
    """Pools are as small as the workload allows, but never smaller than --max-model-len."""
    path = fixtures.make_cycle_target(tmp_path)
    config = fixtures.target_config(max_position_embeddings=8192)
    (path / "config.json").write_text(json.dumps(config), encoding="utf-8")
    report = _bench(
        "latency", str(path), "--draft", "none", "--max-model-len", "8192", "--prompt", "a", "--output-len", "3"
    )
    assert report["settings"]["max_model_len"] == 8192
