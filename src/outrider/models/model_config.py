"""The one place that reads foreign configs: HF ``config.json`` and GGUF metadata become a frozen ``ModelConfig``.

What the decoder cannot compute exactly is refused here, by name, before any weight is read.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping
from typing import Any, Protocol

from outrider.config import ModelConfig, MoEConfig, RopeConfig
from outrider.errors import ConfigError

# model_type of HF -> our name of the architecture
SUPPORTED_MODEL_TYPES = {
    "llama": "LlamaForCausalLM",
    "mixtral": "MixtralForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
}
# What a config.json may leave unsaid, where it differs from the defaults below.
_CLASS_DEFAULTS: Mapping[str, Mapping[str, Any]] = {
    "MixtralForCausalLM": {
        "max_position_embeddings": 131072,
        "num_key_value_heads": 8,
        "rms_norm_eps": 1e-5,
        "rope_theta": 1e6,
    },
    "Qwen3ForCausalLM": {"max_position_embeddings": 32768, "head_dim": 128},
    "Qwen3MoeForCausalLM": {"max_position_embeddings": 32768},
}
_GGUF_ARCHITECTURES = ("llama", "qwen3")  # named as the model types
_ROPE_TYPES = ("default", "linear", "dynamic", "llama3", "yarn")


class SupportsToDict(Protocol):
    """A transformers config object."""

    def to_dict(self) -> dict[str, Any]: ...


def from_hf(
    config: Mapping[str, Any] | SupportsToDict, *, generation_config: Mapping[str, Any] | None = None
) -> ModelConfig:
    """Read a ``config.json`` (or a transformers config object); EOS ids come from the generation config if it has any.

    Both spellings of rotary settings are read: ``rope_parameters`` and ``rope_scaling`` with ``rope_theta``.
    """
    raw: Mapping[str, Any] = config if isinstance(config, Mapping) else config.to_dict()
    architecture = _architecture(raw)
    given = {key: value for key, value in raw.items() if value is not None}
    raw = {**raw, **_CLASS_DEFAULTS.get(architecture, {}), **given}
    _refuse_unsupported(raw)
    qwen3 = architecture in ("Qwen3ForCausalLM", "Qwen3MoeForCausalLM")
    hidden_size, num_heads = _integer(raw, "hidden_size"), _integer(raw, "num_attention_heads")
    attention_bias = bool(raw.get("attention_bias", False))
    max_positions = _integer(raw, "max_position_embeddings", default=2048)
    head_dim = _integer(raw, "head_dim", default=0) or _head_dim(hidden_size, num_heads)
    generation = generation_config or {}
    eos = generation.get("eos_token_id") if generation.get("eos_token_id") is not None else raw.get("eos_token_id")
    return ModelConfig(
        architecture=architecture,
        hidden_size=hidden_size,
        num_layers=_integer(raw, "num_hidden_layers"),
        num_heads=num_heads,
        num_kv_heads=_integer(raw, "num_key_value_heads", default=num_heads),
        head_dim=head_dim,
        intermediate_size=_integer(raw, "intermediate_size"),
        vocab_size=_integer(raw, "vocab_size"),
        rms_norm_eps=_number(raw, "rms_norm_eps", default=1e-6),
        rope=_rope_from_hf(raw, max_positions),
        tie_word_embeddings=bool(raw.get("tie_word_embeddings", False)),
        attention_bias=attention_bias,
        attention_output_bias=attention_bias,
        mlp_bias=bool(raw.get("mlp_bias", False)),
        qk_norm=qwen3,
        max_position_embeddings=max_positions,
        bos_token_id=_integer(raw, "bos_token_id", default=-1),
        eos_token_ids=_token_ids("eos_token_id", eos, vocab_size=_integer(raw, "vocab_size")),
        moe=_moe_from_hf(raw, architecture),
    )


def from_gguf(metadata: Mapping[str, Any], tensor_shapes: Mapping[str, tuple[int, ...]]) -> ModelConfig:
    """Read GGUF metadata; what it leaves unsaid (tied head, biases, vocabulary) is seen from the tensors' names.

    ``tensor_shapes`` are row-major, as torch has them.
    """
    arch = metadata.get("general.architecture")
    if arch not in _GGUF_ARCHITECTURES:
        raise ConfigError(
            f"GGUF general.architecture={arch!r} is not supported; supported: {', '.join(_GGUF_ARCHITECTURES)}"
        )
    raw = {key.removeprefix(f"{arch}."): value for key, value in metadata.items() if key.startswith(f"{arch}.")}
    for key in ("expert_count", "attention.sliding_window"):
        if raw.get(key):
            raise ConfigError(f"GGUF {arch}.{key}={raw[key]} is not supported; only dense full attention is")
    if "token_embd.weight" not in tensor_shapes:
        raise ConfigError("GGUF file has no tensor token_embd.weight; it is not a language model")
    hidden_size, num_heads = _integer(raw, "embedding_length"), _integer(raw, "attention.head_count")
    max_positions = _integer(raw, "context_length")
    head_dim = _integer(raw, "attention.key_length", default=0) or _head_dim(hidden_size, num_heads)
    for key in ("attention.value_length", "rope.dimension_count"):
        if raw.get(key, head_dim) != head_dim:
            raise ConfigError(f"GGUF {arch}.{key}={raw[key]} differs from the head dimension {head_dim}; unsupported")
    eos = [metadata[key] for key in ("tokenizer.ggml.eos_token_id", "tokenizer.ggml.eot_token_id") if key in metadata]
    return ModelConfig(
        architecture=SUPPORTED_MODEL_TYPES[arch],
        hidden_size=hidden_size,
        num_layers=_integer(raw, "block_count"),
        num_heads=num_heads,
        num_kv_heads=_integer(raw, "attention.head_count_kv", default=num_heads),
        head_dim=head_dim,
        intermediate_size=_integer(raw, "feed_forward_length"),
        vocab_size=tensor_shapes["token_embd.weight"][0],
        rms_norm_eps=_single_precision(_number(raw, "attention.layer_norm_rms_epsilon")),
        rope=_rope_from_gguf(raw, tensor_shapes, max_positions),
        tie_word_embeddings="output.weight" not in tensor_shapes,
        attention_bias="blk.0.attn_q.bias" in tensor_shapes,
        attention_output_bias="blk.0.attn_output.bias" in tensor_shapes,
        mlp_bias="blk.0.ffn_gate.bias" in tensor_shapes,
        qk_norm=arch == "qwen3",
        max_position_embeddings=max_positions,
        bos_token_id=_integer(metadata, "tokenizer.ggml.bos_token_id", default=-1),
        eos_token_ids=_token_ids("tokenizer.ggml.eos_token_id", eos, vocab_size=tensor_shapes["token_embd.weight"][0]),
    )


def _architecture(raw: Mapping[str, Any]) -> str:
    """The architecture by name; by ``model_type`` where the name says nothing."""
    listed = raw.get("architectures")
    names = [name for name in listed if isinstance(name, str)] if isinstance(listed, list | tuple) else []
    known = set(SUPPORTED_MODEL_TYPES.values())
    for name in names:
        if name in known:
            return name
    model_type = raw.get("model_type")
    specific = [name for name in names if name.endswith("ForCausalLM") and name not in _GENERIC_ARCHITECTURES]
    if not specific and isinstance(model_type, str) and model_type in SUPPORTED_MODEL_TYPES:
        return SUPPORTED_MODEL_TYPES[model_type]
    raise ConfigError(
        f"model config: architectures={names} with model_type={model_type!r} is not supported; "
        f"supported: {', '.join(sorted(known))} (model_type {', '.join(SUPPORTED_MODEL_TYPES)})"
    )


_GENERIC_ARCHITECTURES = frozenset({"AutoModelForCausalLM", "ForCausalLM"})


def _refuse_unsupported(raw: Mapping[str, Any]) -> None:
    quantization = raw.get("quantization_config")
    if quantization is not None:
        method = quantization.get("quant_method") if isinstance(quantization, Mapping) else quantization
        raise ConfigError(
            f"model config: quantization_config (quant_method={method!r}) is not supported; supported: unquantised "
            "safetensors in float32, float16 or bfloat16, and GGUF"
        )
    sliding = raw.get("sliding_window")
    layer_types = raw.get("layer_types") or []
    if not isinstance(layer_types, list | tuple):
        raise ConfigError(f"model config: layer_types={layer_types!r} must be a list")
    others = sorted({str(kind) for kind in layer_types if kind != "full_attention"})
    if others:
        raise ConfigError(f"model config: layer_types contains {others}; supported: full_attention only")
    if sliding is not None and raw.get("use_sliding_window", True) and not layer_types:
        raise ConfigError(f"model config: sliding_window={sliding} is not supported; only full attention (null) is")
    activation = raw.get("hidden_act", "silu")
    if activation not in ("silu", "swish"):
        raise ConfigError(f"model config: hidden_act={activation!r} is not supported; supported: silu")


def _moe_from_hf(raw: Mapping[str, Any], architecture: str) -> MoEConfig | None:
    """Expert layers, in either spelling of their number. Noise on the router is a matter of training alone."""
    if architecture not in ("MixtralForCausalLM", "Qwen3MoeForCausalLM"):
        return None
    mixtral, num_layers = architecture == "MixtralForCausalLM", _integer(raw, "num_hidden_layers")
    names = [key for key in ("num_experts", "num_local_experts") if raw.get(key) is not None]
    if len(names) > 1 and raw[names[0]] != raw[names[1]]:
        raise ConfigError(
            f"model config: num_experts={raw['num_experts']!r} differs from num_local_experts="
            f"{raw['num_local_experts']!r}; they are two names of one number"
        )
    num_experts = _integer(raw, names[0] if names else "num_local_experts" if mixtral else "num_experts")
    if not mixtral and num_experts == 0:
        return None  # every layer is dense
    shared = raw.get("shared_expert_intermediate_size") or raw.get("n_shared_experts")
    if shared:
        raise ConfigError(f"model config: shared experts ({shared}) are not supported; only routed ones are")
    return MoEConfig(
        num_experts=num_experts,
        num_experts_per_tok=_integer(raw, "num_experts_per_tok"),
        moe_intermediate_size=_integer(raw, "intermediate_size" if mixtral else "moe_intermediate_size"),
        norm_topk_prob=mixtral or _boolean(raw, "norm_topk_prob", default=False),
        sparse_layers=(True,) * num_layers if mixtral else _sparse_layers(raw, num_layers),
    )


def _sparse_layers(raw: Mapping[str, Any], num_layers: int) -> tuple[bool, ...]:
    """Every ``decoder_sparse_step``-th layer has experts, but for those in ``mlp_only_layers``."""
    step = _integer(raw, "decoder_sparse_step", default=1)
    if step < 1:
        raise ConfigError(f"model config: decoder_sparse_step={step} must be at least 1")
    dense = raw.get("mlp_only_layers") or []
    if not isinstance(dense, list | tuple) or any(isinstance(i, bool) or not isinstance(i, int) for i in dense):
        raise ConfigError(f"model config: mlp_only_layers={dense!r} must be a list of layer numbers")
    outside = [i for i in dense if not 0 <= i < num_layers]
    if outside:
        raise ConfigError(
            f"model config: mlp_only_layers={list(dense)} names layer {outside[0]}, outside 0..{num_layers - 1}"
        )
    return tuple((i + 1) % step == 0 and i not in dense for i in range(num_layers))


def _rope_from_hf(raw: Mapping[str, Any], max_positions: int) -> RopeConfig:
    settings: dict[str, Any] = {"rope_theta": raw.get("rope_theta")}
    for key in ("rope_scaling", "rope_parameters"):
        value = raw.get(key) or {}
        if not isinstance(value, Mapping) or any(isinstance(part, Mapping) for part in value.values()):
            raise ConfigError(f"model config: {key}={value!r} is not supported; supported: one flat object")
        settings.update(value)
    rope_type = settings.get("rope_type", settings.get("type", "default"))
    if rope_type not in _ROPE_TYPES:
        raise ConfigError(
            f"model config: rope_type={rope_type!r} is not supported; supported: " + ", ".join(_ROPE_TYPES)
        )
    partial = settings.get("partial_rotary_factor", raw.get("partial_rotary_factor", 1.0))
    if partial not in (None, 1.0):
        raise ConfigError(f"model config: partial_rotary_factor={partial} is not supported; supported: 1.0")
    original = _integer(settings, "original_max_position_embeddings", default=0) or _integer(
        raw, "original_max_position_embeddings", default=0
    )
    factor = _number(settings, "factor", default=1.0)
    if settings.get("factor") is None and rope_type == "yarn" and original:
        factor = max_positions / original
    elif settings.get("factor") is None and rope_type != "default":
        raise ConfigError(f"model config: rope_type={rope_type!r} needs a factor, and there is none")
    return _checked_rope(
        RopeConfig(
            theta=_number(settings, "rope_theta", default=10000.0),
            rope_type=rope_type,
            factor=factor,
            low_freq_factor=_number(settings, "low_freq_factor", default=1.0),
            high_freq_factor=_number(settings, "high_freq_factor", default=4.0),
            original_max_position_embeddings=original or max_positions,
            beta_fast=_number(settings, "beta_fast", default=32.0),
            beta_slow=_number(settings, "beta_slow", default=1.0),
            attention_factor=_number(settings, "attention_factor", default=0.0),
            mscale=_number(settings, "mscale", default=0.0),
            mscale_all_dim=_number(settings, "mscale_all_dim", default=0.0),
            truncate=bool(settings.get("truncate", True)),
        )
    )


def _checked_rope(rope: RopeConfig) -> RopeConfig:
    """Values the formulas divide by, or take the logarithm of, must be positive."""
    for name in ("theta", "factor", "original_max_position_embeddings", "beta_fast", "beta_slow"):
        value = getattr(rope, name)
        if not value > 0:
            raise ConfigError(f"model config: rope {name}={value:g} must be positive")
    if rope.rope_type == "llama3" and rope.low_freq_factor >= rope.high_freq_factor:
        raise ConfigError(
            f"model config: rope low_freq_factor={rope.low_freq_factor:g} must be less than "
            f"high_freq_factor={rope.high_freq_factor:g}"
        )
    return rope


def _rope_from_gguf(
    raw: Mapping[str, Any], tensor_shapes: Mapping[str, tuple[int, ...]], max_positions: int
) -> RopeConfig:
    if "rope_freqs.weight" in tensor_shapes:
        raise ConfigError("GGUF tensor rope_freqs.weight (per-dimension rotary factors) is not supported")
    scaling = raw.get("rope.scaling.type", "none")
    if scaling not in ("none", "linear", "yarn"):
        raise ConfigError(f"GGUF rope.scaling.type={scaling!r} is not supported; supported: none, linear, yarn")
    theta = _number(raw, "rope.freq_base", default=10000.0)
    if scaling == "none":
        return _checked_rope(RopeConfig(theta=theta, original_max_position_embeddings=max_positions))
    return _checked_rope(
        RopeConfig(
            theta=theta,
            rope_type=scaling,
            factor=_number(raw, "rope.scaling.factor"),
            original_max_position_embeddings=_integer(
                raw, "rope.scaling.original_context_length", default=max_positions
            ),
        )
    )


def _integer(raw: Mapping[str, Any], key: str, *, default: int | None = None) -> int:
    value = raw.get(key)
    if value is None and default is not None:
        return default
    if isinstance(value, bool) or not isinstance(value, int):
        raise ConfigError(f"model config: {key}={value!r} must be an integer")
    return value


def _boolean(raw: Mapping[str, Any], key: str, *, default: bool) -> bool:
    value = raw.get(key)
    if value is None:
        return default
    if not isinstance(value, bool):
        raise ConfigError(f"model config: {key}={value!r} must be true or false")
    return value


def _number(raw: Mapping[str, Any], key: str, *, default: float | None = None) -> float:
    value = raw.get(key)
    if value is None and default is not None:
        return default
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ConfigError(f"model config: {key}={value!r} must be a number")
    if not abs(value) <= sys.float_info.max:  # JSON as Python reads it has NaN, infinity and integers of any length
        raise ConfigError(f"model config: {key}={value!r} must be finite")
    return float(value)


def _single_precision(value: float) -> float:
    """The shortest decimal that a value stored in fp32 stands for (9.999999747378752e-06 is 1e-05)."""
    rounded = float(f"{value:.6g}")
    return rounded if math.isclose(rounded, value, rel_tol=1e-6) else value


def _head_dim(hidden_size: int, num_heads: int) -> int:
    if num_heads < 1 or hidden_size % num_heads:
        raise ConfigError(
            f"model config: hidden_size={hidden_size} must be a multiple of num_attention_heads={num_heads} "
            "where head_dim is not given"
        )
    return hidden_size // num_heads


def _token_ids(key: str, value: object, *, vocab_size: int) -> tuple[int, ...]:
    """Distinct ids in order. One outside the vocabulary (some configs say -1 for none) is never emitted: left out."""
    ids = value if isinstance(value, list | tuple) else [] if value is None else [value]
    for token_id in ids:
        if isinstance(token_id, bool) or not isinstance(token_id, int):
            raise ConfigError(f"model config: {key}={value!r} must be an integer or a list of integers")
    return tuple(token_id for token_id in dict.fromkeys(ids) if 0 <= token_id < vocab_size)
