"""Writes GGUF files for tests with the gguf package's own writer, from tensors under HF names and in HF layout."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGMLQuantizationType, GGUFWriter
from gguf.quants import quantize
from torch import Tensor

GLOBAL_NAMES = {"embed_tokens": "token_embd", "norm": "output_norm", "lm_head": "output"}
LAYER_NAMES = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
BYTES = [chr(b) if 33 <= b <= 126 or b in range(161, 173) or b >= 174 else "" for b in range(256)]


def byte_alphabet() -> list[str]:
    """The 256 characters by which byte-level BPE writes bytes: printable ones stand for themselves."""
    spare = iter(range(256, 512))
    return [character or chr(next(spare)) for character in BYTES]


def gguf_name(hf_name: str) -> str:
    stem, kind = hf_name.removeprefix("model.").rsplit(".", 1)
    if stem in GLOBAL_NAMES:
        return f"{GLOBAL_NAMES[stem]}.{kind}"
    _, layer, part = stem.split(".", 2)
    return f"blk.{layer}.{LAYER_NAMES[part]}.{kind}"


def interleaved_rows(weight: Tensor, heads: int) -> Tensor:
    """Each head's rows 0, D/2, 1, D/2 + 1, ...: as the llama architecture stores q and k."""
    head_dim = weight.shape[0] // heads
    order = [pair + half * head_dim // 2 for pair in range(head_dim // 2) for half in range(2)]
    return weight[[head * head_dim + row for head in range(heads) for row in order]]


def write_gguf(
    path: Path,
    architecture: str,
    config: Mapping[str, Any],
    tensors: Mapping[str, Tensor],
    *,
    tokens: Sequence[str],
    types: Sequence[int],
    merges: Sequence[str] = (),
    pre: str = "gpt-2",
    extra: Mapping[str, Any] | None = None,
    quantisation: GGMLQuantizationType = GGMLQuantizationType.F32,
) -> Path:
    """``config`` is a ``config.json``; matrices are stored in ``quantisation``, everything else in fp32."""
    writer = GGUFWriter(path, architecture)
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(config["head_dim"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(config["rope_theta"])
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(list(tokens))
    writer.add_token_types(list(types))
    if merges:
        writer.add_token_merges(list(merges))
    writer.add_eos_token_id(config["eos_token_id"])
    for key, value in (extra or {}).items():
        writer.add_string(key, value) if isinstance(value, str) else writer.add_uint32(key, value)
    for hf_name, tensor in tensors.items():
        if architecture == "llama" and ".q_proj." in hf_name:
            tensor = interleaved_rows(tensor, config["num_attention_heads"])
        elif architecture == "llama" and ".k_proj." in hf_name:
            tensor = interleaved_rows(tensor, config["num_key_value_heads"])
        array = tensor.float().contiguous().numpy()
        if array.ndim == 2 and quantisation != GGMLQuantizationType.F32:
            packed: np.ndarray[Any, Any] = quantize(array, quantisation)
            writer.add_tensor(gguf_name(hf_name), packed, raw_dtype=quantisation)
        else:
            writer.add_tensor(gguf_name(hf_name), array)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
