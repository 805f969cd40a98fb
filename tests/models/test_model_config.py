"""Reading foreign configs: what is understood, and what is refused by name."""

from __future__ import annotations

from typing import Any

import pytest
from transformers import LlamaConfig, MixtralConfig, Qwen3Config

from outrider.config import ModelConfig, MoEConfig
from outrider.errors import ConfigError
from outrider.models.model_config import from_gguf, from_hf

LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 64,
    "vocab_size": 100,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def test_both_spellings_of_rotary_settings_mean_the_same() -> None:
    scaling = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64}
    old = from_hf({**LLAMA, "rope_theta": 5e5, "rope_scaling": {"rope_type": "llama3", **scaling}})
    new = from_hf({**LLAMA, "rope_parameters": {"rope_type": "llama3", "rope_theta": 5e5, **scaling}})
    oldest = from_hf({**LLAMA, "rope_theta": 5e5, "rope_scaling": {"type": "llama3", **scaling}})
    assert old == new == oldest
    assert (old.rope.theta, old.rope.rope_type, old.rope.factor) == (5e5, "llama3", 8.0)
    assert old.rope.original_max_position_embeddings == 64


def test_defaults() -> None:
    config = from_hf(LLAMA)
    assert (config.num_kv_heads, config.head_dim, config.rope.theta) == (4, 8, 10000.0)
    assert not any((config.tie_word_embeddings, config.attention_bias, config.mlp_bias, config.qk_norm))
    assert (config.bos_token_id, config.eos_token_ids) == (1, (2,))


@pytest.mark.parametrize("changes", [{"head_dim": None}, {"num_key_value_heads": None, "rope_scaling": None}])
def test_null_means_absent(changes: dict[str, Any]) -> None:
    assert from_hf({**LLAMA, **changes}) == from_hf(LLAMA)


def test_transformers_config_objects() -> None:
    llama = from_hf(LlamaConfig(num_attention_heads=8, num_key_value_heads=2, hidden_size=64, head_dim=24))
    assert (llama.architecture, llama.head_dim, llama.num_kv_heads) == ("LlamaForCausalLM", 24, 2)
    qwen = from_hf(Qwen3Config(hidden_size=64, num_attention_heads=4, num_key_value_heads=2, attention_bias=True))
    assert (qwen.architecture, qwen.head_dim, qwen.qk_norm) == ("Qwen3ForCausalLM", 128, True)
    assert qwen.attention_bias
    assert qwen.attention_output_bias


def test_generation_config_names_the_stop_tokens() -> None:
    assert from_hf(LLAMA, generation_config={"eos_token_id": [7, 2, 7]}).eos_token_ids == (7, 2)
    assert from_hf(LLAMA, generation_config={}).eos_token_ids == (2,)
    assert from_hf({**LLAMA, "eos_token_id": None, "bos_token_id": None}).eos_token_ids == ()


def test_stop_tokens_outside_the_vocabulary_are_left_out() -> None:
    """They are never emitted, and banning them until min_tokens would index outside the logits."""
    assert from_hf({**LLAMA, "eos_token_id": -1}).eos_token_ids == ()
    assert from_hf(LLAMA, generation_config={"eos_token_id": [100, 99, 2**70]}).eos_token_ids == (99,)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 10**400])
@pytest.mark.parametrize("name", ["rms_norm_eps", "rope_theta"])
def test_numbers_must_be_finite(name: str, value: float) -> None:
    with pytest.raises(ConfigError, match=f"{name}=.* must be finite"):
        from_hf({**LLAMA, name: value})


def test_a_generic_architecture_falls_back_to_the_model_type() -> None:
    for names in (["AutoModelForCausalLM"], ["Model"], [], None):
        config = from_hf({**LLAMA, "architectures": names, "model_type": "qwen3"})
        assert (config.architecture, config.head_dim) == ("Qwen3ForCausalLM", 128)


@pytest.mark.parametrize(
    "changes",
    [
        {"sliding_window": None},
        {"sliding_window": 64, "use_sliding_window": False},
        {"layer_types": ["full_attention", "full_attention"], "sliding_window": 64},
        {"quantization_config": None},
        {"partial_rotary_factor": 1.0},
    ],
)
def test_harmless_settings_are_accepted(changes: dict[str, Any]) -> None:
    assert from_hf({**LLAMA, **changes}) == from_hf(LLAMA)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"architectures": ["GptOssForCausalLM"], "model_type": "gpt_oss"}, r"GptOssForCausalLM.*supported: Llama"),
        ({"architectures": ["MistralForCausalLM"], "model_type": "llama"}, r"MistralForCausalLM.*supported: Llama"),
        ({"architectures": None, "model_type": "gpt2"}, r"'gpt2'.*llama, mixtral, qwen3"),
        ({"rope_scaling": {"rope_type": "longrope", "factor": 2.0}}, r"'longrope'.*yarn"),
        ({"rope_scaling": {"rope_type": "linear"}}, r"'linear' needs a factor"),
        ({"partial_rotary_factor": 0.5}, r"partial_rotary_factor=0.5"),
        ({"sliding_window": 64}, r"sliding_window=64"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, r"sliding_attention.*full_attention"),
        ({"quantization_config": {"quant_method": "awq"}}, r"'awq'.*GGUF"),
        ({"quantization_config": "awq"}, r"quantization_config.*'awq'"),
        ({"hidden_act": "gelu"}, r"'gelu'.*silu"),
        ({"hidden_size": None}, r"hidden_size=None"),
        ({"hidden_size": "32"}, r"hidden_size='32'"),
        ({"hidden_size": 30}, r"hidden_size=30.*num_attention_heads=4"),
        ({"num_attention_heads": 0}, r"num_attention_heads=0"),
        ({"num_key_value_heads": 3}, r"num_heads=4.*num_kv_heads=3"),
        ({"head_dim": 7}, r"head_dim=7"),
        ({"num_hidden_layers": 0}, r"num_layers=0"),
        ({"eos_token_id": "2"}, r"eos_token_id='2'"),
        ({"rms_norm_eps": "small"}, r"rms_norm_eps='small'"),
        ({"rope_theta": "big"}, r"rope_theta='big'"),
        ({"rope_scaling": "yarn"}, r"rope_scaling='yarn'"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 0}}, r"factor=0"),
        ({"rope_parameters": {"full_attention": {"rope_theta": 1e4}}}, r"rope_parameters=.*flat"),
        (
            {"rope_scaling": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 4.0}},
            r"low_freq_factor=4.*high_freq_factor=4",
        ),
    ],
)
def test_refusals_name_what_was_found_and_what_is_supported(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        from_hf({**LLAMA, **changes})


GGUF: dict[str, Any] = {
    "general.architecture": "llama",
    "llama.embedding_length": 32,
    "llama.block_count": 2,
    "llama.attention.head_count": 4,
    "llama.attention.head_count_kv": 2,
    "llama.feed_forward_length": 64,
    "llama.context_length": 128,
    "llama.attention.layer_norm_rms_epsilon": 9.999999747378752e-06,
    "llama.rope.freq_base": 1e5,
    "tokenizer.ggml.bos_token_id": 1,
    "tokenizer.ggml.eos_token_id": 2,
    "tokenizer.ggml.eot_token_id": 3,
}
SHAPES: dict[str, tuple[int, ...]] = {"token_embd.weight": (100, 32)}


def gguf(changes: dict[str, Any] | None = None, shapes: dict[str, tuple[int, ...]] | None = None) -> ModelConfig:
    return from_gguf({**GGUF, **(changes or {})}, {**SHAPES, **(shapes or {})})


def test_gguf_metadata() -> None:
    config = gguf()
    assert (config.vocab_size, config.head_dim, config.rms_norm_eps) == (100, 8, 1e-5)
    assert config.tie_word_embeddings
    assert config.eos_token_ids == (2, 3)
    assert not gguf(shapes={"output.weight": (100, 32)}).tie_word_embeddings
    biased = gguf(shapes={"blk.0.attn_q.bias": (32,)})
    assert (biased.attention_bias, biased.attention_output_bias) == (True, False)


def test_gguf_rotary_scaling() -> None:
    rope = gguf(
        {
            "llama.rope.scaling.type": "yarn",
            "llama.rope.scaling.factor": 4.0,
            "llama.rope.scaling.original_context_length": 32,
        }
    ).rope
    assert (rope.rope_type, rope.factor, rope.original_max_position_embeddings) == (
        "yarn",
        4.0,
        32,
    )


@pytest.mark.parametrize(
    ("changes", "shapes", "message"),
    [
        ({"general.architecture": "gemma"}, {}, r"'gemma'.*llama, qwen3"),
        ({"llama.expert_count": 8}, {}, r"expert_count=8"),
        ({"llama.attention.sliding_window": 64}, {}, r"sliding_window=64"),
        ({"llama.rope.dimension_count": 4}, {}, r"dimension_count=4.*8"),
        ({"llama.rope.scaling.type": "longrope"}, {}, r"'longrope'.*linear, yarn"),
        ({"llama.attention.head_count_kv": [2, 1]}, {}, r"head_count_kv=\[2, 1\]"),
        ({}, {"rope_freqs.weight": (4,)}, r"rope_freqs"),
    ],
)
def test_gguf_refusals(changes: dict[str, Any], shapes: dict[str, tuple[int, ...]], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        gguf(changes, shapes)


def test_gguf_without_embedding() -> None:
    with pytest.raises(ConfigError, match=r"token_embd\.weight"):
        from_gguf(GGUF, {})


MIXTRAL: dict[str, Any] = {
    **LLAMA,
    "architectures": ["MixtralForCausalLM"],
    "model_type": "mixtral",
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "num_key_value_heads": 2,
    "router_jitter_noise": 0.1,
    "sliding_window": None,
}
QWEN3_MOE: dict[str, Any] = {
    **LLAMA,
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "num_hidden_layers": 4,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "norm_topk_prob": True,
    "head_dim": 16,
}


def test_mixtral() -> None:
    config = from_hf(MIXTRAL)
    assert config.moe == MoEConfig(
        num_experts=4, num_experts_per_tok=2, moe_intermediate_size=64, norm_topk_prob=True, sparse_layers=(True, True)
    )
    assert not config.qk_norm
    assert config.rope.theta == 1e6  # what transformers takes where the file is silent
    assert from_hf(MixtralConfig()).moe is not None


def test_qwen3_moe() -> None:
    config = from_hf(QWEN3_MOE)
    assert config.moe is not None
    assert (config.moe.num_experts, config.moe.moe_intermediate_size, config.moe.norm_topk_prob) == (8, 16, True)
    assert config.moe.sparse_layers == (True,) * 4
    assert (config.qk_norm, config.head_dim, config.intermediate_size) == (True, 16, 64)
    renamed = {("num_local_experts" if key == "num_experts" else key): value for key, value in QWEN3_MOE.items()}
    assert from_hf(renamed) == config
    assert from_hf({**QWEN3_MOE, "head_dim": None}).head_dim == 8
    assert from_hf({**QWEN3_MOE, "num_experts": 0}).moe is None


@pytest.mark.parametrize(
    ("changes", "sparse"),
    [
        ({"decoder_sparse_step": 2}, (False, True, False, True)),
        ({"mlp_only_layers": [0, 3]}, (False, True, True, False)),
        ({"decoder_sparse_step": 2, "mlp_only_layers": [1]}, (False, False, False, True)),
        ({"mlp_only_layers": None, "decoder_sparse_step": None}, (True,) * 4),
    ],
)
def test_which_layers_have_experts_is_what_transformers_builds(
    changes: dict[str, Any], sparse: tuple[bool, ...]
) -> None:
    moe = from_hf({**QWEN3_MOE, **changes}).moe
    assert moe is not None
    assert moe.sparse_layers == sparse


@pytest.mark.parametrize(
    ("base", "changes", "message"),
    [
        (MIXTRAL, {"num_local_experts": None}, r"num_local_experts=None"),
        (MIXTRAL, {"num_experts_per_tok": 5}, r"num_experts_per_tok=5 exceeds num_experts=4"),
        (MIXTRAL, {"num_local_experts": 0}, r"num_experts=0"),
        (MIXTRAL, {"num_experts_per_tok": "2"}, r"num_experts_per_tok='2'"),
        (MIXTRAL, {"sliding_window": 4096}, r"sliding_window=4096"),
        (MIXTRAL, {"num_experts": 8}, r"num_experts=8 differs from num_local_experts=4"),
        (QWEN3_MOE, {"num_experts": None}, r"num_experts=None"),
        (QWEN3_MOE, {"num_experts": [8], "num_local_experts": 8}, r"num_experts=\[8\] differs"),
        (QWEN3_MOE, {"moe_intermediate_size": None}, r"moe_intermediate_size=None"),
        (QWEN3_MOE, {"moe_intermediate_size": 0}, r"moe_intermediate_size=0"),
        (QWEN3_MOE, {"norm_topk_prob": "yes"}, r"norm_topk_prob='yes'"),
        (QWEN3_MOE, {"decoder_sparse_step": 0}, r"decoder_sparse_step=0"),
        (QWEN3_MOE, {"mlp_only_layers": [4]}, r"mlp_only_layers=\[4\] names layer 4, outside 0\.\.3"),
        (QWEN3_MOE, {"mlp_only_layers": "0"}, r"mlp_only_layers='0'"),
        (QWEN3_MOE, {"shared_expert_intermediate_size": 32}, r"shared experts \(32\)"),
    ],
)
def test_refused_expert_settings(base: dict[str, Any], changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        from_hf({**base, **changes})
