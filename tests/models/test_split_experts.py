"""A dense Llama split into experts: the same logits here and in transformers, every slice once, all files or none."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tests import fixtures
from tests.models.gguf_writing import byte_alphabet, write_gguf
from tests.models.test_decoder import expected, oracle, prompt
from tests.paged import PagedSequences
from torch import Tensor
from transformers import AutoTokenizer, MixtralForCausalLM
from typer.testing import CliRunner

from outrider.cli.main import build_app
from outrider.errors import ConfigError
from outrider.models.inspection import inspect_path
from outrider.models.source import DEFAULT_MODEL, load_model
from outrider.models.split_experts import split_experts

LLAMA: dict[str, Any] = {"vocab_size": fixtures.VOCAB, "intermediate_size": 64, "eos_token_id": fixtures.EOS_ID}


def make_dense(path: Path, **changes: Any) -> Path:
    """A random Llama with norms and rotary settings that are not the defaults, and a tokenizer."""
    theirs = oracle("llama", {**LLAMA, "rms_norm_eps": 1e-5, **changes})
    theirs.save_pretrained(path)
    fixtures.write_tokenizer(path)
    return path


def our_logits(path: Path, tokens: list[int]) -> Tensor:
    loaded = load_model(str(path))
    return PagedSequences(loaded.model, requests=1, max_len=32).run({0: tokens}).logits[0]


@pytest.mark.parametrize(
    ("num_experts", "changes"),
    [
        (1, {}),
        (8, {}),
        (4, {"tie_word_embeddings": True, "rope_parameters": {"rope_type": "default", "rope_theta": 1e5}}),
        (16, {"head_dim": 12, "rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}}),
    ],
)
def test_same_logits_as_the_dense_model_here_and_in_transformers(
    num_experts: int, changes: dict[str, Any], tmp_path: Path
) -> None:
    dense = make_dense(tmp_path / "dense", **changes)
    result = split_experts(str(dense), num_experts=num_experts, output=tmp_path / "moe")
    tokens = prompt(21, seed=1)
    want = our_logits(dense, tokens)
    torch.testing.assert_close(our_logits(tmp_path / "moe", tokens), want, rtol=0, atol=1e-5)
    theirs = MixtralForCausalLM.from_pretrained(tmp_path / "moe", dtype=torch.float32).eval()
    torch.testing.assert_close(expected(theirs, tokens)[0], want, rtol=0, atol=1e-5)
    assert theirs.config.num_local_experts == theirs.config.num_experts_per_tok == num_experts
    inspection = inspect_path(str(tmp_path / "moe"))
    assert inspection.loadable
    assert inspection.config == load_model(str(tmp_path / "moe")).config == result.config
    assert inspection.config.eos_token_ids == (fixtures.EOS_ID,)


def test_every_slice_is_there_once_and_exact(tmp_path: Path) -> None:
    dense = make_dense(tmp_path / "dense")
    split_experts(str(dense), num_experts=8, output=tmp_path / "moe")
    before, after = load_file(dense / "model.safetensors"), load_file(tmp_path / "moe" / "model.safetensors")
    for layer in range(3):
        old, new = f"model.layers.{layer}.mlp.", f"model.layers.{layer}.block_sparse_moe."
        experts = [[after.pop(f"{new}experts.{e}.{w}.weight") for e in range(8)] for w in ("w1", "w3", "w2")]
        assert torch.equal(torch.cat(experts[0]), before.pop(old + "gate_proj.weight"))
        assert torch.equal(torch.cat(experts[1]), before.pop(old + "up_proj.weight"))
        assert torch.equal(torch.cat(experts[2], dim=1), 8 * before.pop(old + "down_proj.weight"))
        assert not after.pop(new + "gate.weight").any()
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_shards(tmp_path: Path) -> None:
    dense = make_dense(tmp_path / "dense")
    whole = split_experts(str(dense), num_experts=4, output=tmp_path / "whole")
    parts = split_experts(str(dense), num_experts=4, output=tmp_path / "parts", max_shard_bytes=20_000)
    assert len(parts.files) > 2
    assert all((tmp_path / "parts" / file).stat().st_size < 40_000 for file in parts.files)
    assert (parts.num_tensors, parts.stored_bytes) == (whole.num_tensors, whole.stored_bytes)
    tokens = prompt(9, seed=2)
    assert torch.equal(our_logits(tmp_path / "parts", tokens), our_logits(tmp_path / "whole", tokens))
    MixtralForCausalLM.from_pretrained(tmp_path / "parts")


def test_a_gguf_file_and_its_tokenizer(tmp_path: Path) -> None:
    """Ids of our loader and of transformers on the new directory equal those of the GGUF file's own tokenizer."""
    alphabet = byte_alphabet()
    tokens = [*alphabet, "he", "ll", "hell", "<|im_start|>", "<|im_end|>", "<|endoftext|>"]
    types = [1] * (len(tokens) - 3) + [3] * 3
    theirs = oracle("llama", {**LLAMA, "vocab_size": len(tokens), "head_dim": 8, "tie_word_embeddings": True})
    config = {**theirs.config.to_dict(), "rope_theta": 10000.0, "eos_token_id": len(tokens) - 2}
    template = "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    gguf = write_gguf(
        tmp_path / "dense.gguf", "llama", config,
        {name: tensor for name, tensor in theirs.state_dict().items() if name != "lm_head.weight"},
        tokens=tokens, types=types, merges=["h e", "l l", "he ll"], pre="smollm",
        extra={"tokenizer.chat_template": template},
    )  # fmt: skip
    split_experts(str(gguf), num_experts=8, output=tmp_path / "moe")
    before, after = load_model(str(gguf)), load_model(str(tmp_path / "moe"))
    hf = AutoTokenizer.from_pretrained(tmp_path / "moe")
    for text in ("hello hell", "12 34\n", "<|im_start|>user\nh\u00e9!<|im_end|>", "\u65e5\u672c \U0001f642"):
        ids = before.tokenizer.encode(text, add_special_tokens=True)
        assert after.tokenizer.encode(text, add_special_tokens=True) == ids
        assert hf.encode(text) == ids
        assert hf.decode(ids) == after.tokenizer.decode(ids, skip_special_tokens=False)
    chat = [{"role": "user", "content": "hello"}]
    assert after.tokenizer.encode_chat(chat, add_generation_prompt=True) == before.tokenizer.encode_chat(
        chat, add_generation_prompt=True
    )
    assert after.tokenizer.special_token_ids == before.tokenizer.special_token_ids
    assert after.config.eos_token_ids == before.config.eos_token_ids
    ids = before.tokenizer.encode("hello hell", add_special_tokens=False)
    want = PagedSequences(before.model, requests=1, max_len=16).run({0: ids}).logits[0]
    torch.testing.assert_close(our_logits(tmp_path / "moe", ids), want, rtol=0, atol=1e-5)


def test_bf16_is_exact_too(tmp_path: Path) -> None:
    dense = make_dense(tmp_path / "dense")
    split_experts(str(dense), num_experts=4, output=tmp_path / "moe", dtype="bfloat16")
    tensors = load_file(tmp_path / "moe" / "model.safetensors")
    down = load_file(dense / "model.safetensors")["model.layers.0.mlp.down_proj.weight"].bfloat16()
    parts = [tensors[f"model.layers.0.block_sparse_moe.experts.{e}.w2.weight"] for e in range(4)]
    assert torch.equal(torch.cat(parts, dim=1), 4 * down)
    assert json.loads((tmp_path / "moe" / "config.json").read_text())["dtype"] == "bfloat16"


@pytest.mark.parametrize(
    ("num_experts", "changes", "message"),
    [
        (3, {}, r"num_experts=3 must be a power of two"),
        (0, {}, r"num_experts=0 must be a power of two"),
        (128, {}, r"num_experts=128 does not divide intermediate_size=64"),
        (4, {"mlp_bias": True}, r"mlp_bias=True"),
        (4, {"attention_bias": True}, r"attention_bias=True"),
    ],
)
def test_what_cannot_be_split_exactly_is_refused(
    num_experts: int, changes: dict[str, Any], message: str, tmp_path: Path
) -> None:
    dense = make_dense(tmp_path / "dense", **changes)
    with pytest.raises(ConfigError, match=message):
        split_experts(str(dense), num_experts=num_experts, output=tmp_path / "moe")
    assert [path.name for path in tmp_path.iterdir()] == ["dense"]


def test_other_models_and_existing_outputs_are_refused(tmp_path: Path) -> None:
    qwen = fixtures.make_rand_target(tmp_path / "qwen")
    with pytest.raises(ConfigError, match="dense Llama, and this is a Qwen3ForCausalLM"):
        split_experts(str(qwen), num_experts=4, output=tmp_path / "moe")
    dense = make_dense(tmp_path / "dense")
    with pytest.raises(ConfigError, match="exists and is not an empty directory"):
        split_experts(str(dense), num_experts=4, output=qwen)
    (tmp_path / "empty").mkdir()
    split_experts(str(dense), num_experts=4, output=tmp_path / "empty")
    assert inspect_path(str(tmp_path / "empty")).loadable


def test_the_command(tmp_path: Path) -> None:
    dense = make_dense(tmp_path / "dense")
    arguments = ["convert", "split-experts", str(dense), "--num-experts", "4", "--output", str(tmp_path / "moe")]
    result = CliRunner().invoke(build_app("convert"), [*arguments, "--json"])
    assert result.exit_code == 0, result.output
    said = json.loads(result.stdout.splitlines()[-1])
    assert (said["num_experts"], said["moe_intermediate_size"], said["files"]) == (4, 16, ["model.safetensors"])
    again = CliRunner().invoke(build_app("convert"), [*arguments, "--json"])
    assert again.exit_code == 1
    assert "exists and is not an empty directory" in json.loads(again.stdout.splitlines()[-1])["error"]


@pytest.mark.real_model
@pytest.mark.slow
def test_the_built_in_model(tmp_path: Path) -> None:
    """smollm2-135m in 8 experts: logits within 1e-3 of the dense model's, the same ids, and transformers reads it."""
    split_experts(DEFAULT_MODEL, num_experts=8, output=tmp_path / "moe")
    dense, moe = load_model(DEFAULT_MODEL), load_model(str(tmp_path / "moe"))
    ids = dense.tokenizer.encode("The capital of France is 12 km\n away, \u65e5\u672c", add_special_tokens=True)
    hf = AutoTokenizer.from_pretrained(tmp_path / "moe")
    assert moe.tokenizer.encode("The capital of France is 12 km\n away, \u65e5\u672c", add_special_tokens=True) == ids
    assert hf.encode("The capital of France is 12 km\n away, \u65e5\u672c") == ids
    chat = [{"role": "user", "content": "Why is the sky blue?"}]
    assert moe.tokenizer.encode_chat(chat, add_generation_prompt=True) == dense.tokenizer.encode_chat(
        chat, add_generation_prompt=True
    )
    want, got = (
        PagedSequences(loaded.model, requests=1, max_len=64).run({0: ids}).logits[0] for loaded in (dense, moe)
    )
    torch.testing.assert_close(got, want, rtol=0, atol=1e-3)
    theirs = MixtralForCausalLM.from_pretrained(tmp_path / "moe", dtype=torch.float32).eval()
    torch.testing.assert_close(expected(theirs, ids)[0], want, rtol=0, atol=1e-3)
