"""Writing a ``ModelConfig`` as a ``config.json``: the inverse of ``models.model_config.from_hf``.

Rotary settings are written in both spellings, since readers know one or the other.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from outrider.config import ModelConfig, MoEConfig


def model_config_to_json(config: ModelConfig) -> dict[str, Any]:
    """All fields but ``architectures``, ``dtype``: ``from_hf`` of the result is ``config`` again."""
    assert config.attention_bias == config.attention_output_bias, "HF configs have one attention_bias"
    moe, is_mixtral = config.moe, config.moe is not None and not config.qk_norm
    rope = dataclasses.asdict(config.rope)
    theta, rope_type = rope.pop("theta"), rope["rope_type"]
    scaling = None if rope_type == "default" else {key: value for key, value in rope.items() if value}
    if scaling is not None:
        scaling["truncate"] = config.rope.truncate
    kind: dict[str, Any]
    if is_mixtral:
        assert not config.attention_bias, "Mixtral has no biases"
        assert not config.mlp_bias, "Mixtral has no biases"
        kind = {"model_type": "mixtral", "sliding_window": None}
    else:
        kind = {
            "model_type": "qwen3_moe" if moe else "qwen3" if config.qk_norm else "llama",
            "attention_bias": config.attention_bias,
            "mlp_bias": config.mlp_bias,
            "layer_types": ["full_attention"] * config.num_layers,
        }
    return {
        **kind,
        "hidden_size": config.hidden_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "intermediate_size": config.intermediate_size,
        **(_moe_to_json(moe, is_mixtral=is_mixtral) if moe else {}),
        "vocab_size": config.vocab_size,
        "hidden_act": "silu",
        "rms_norm_eps": config.rms_norm_eps,
        "rope_theta": theta,
        "rope_scaling": scaling,
        "rope_parameters": {"rope_theta": theta, **(scaling or {"rope_type": "default"})},
        "max_position_embeddings": config.max_position_embeddings,
        "tie_word_embeddings": config.tie_word_embeddings,
        "bos_token_id": None if config.bos_token_id < 0 else config.bos_token_id,
        "eos_token_id": list(config.eos_token_ids),
    }


def _moe_to_json(moe: MoEConfig, *, is_mixtral: bool) -> dict[str, Any]:
    if is_mixtral:
        assert moe.norm_topk_prob, "Mixtral normalises the chosen weights"
        assert all(moe.sparse_layers), "Mixtral has experts in every layer"
        return {"num_local_experts": moe.num_experts, "num_experts_per_tok": moe.num_experts_per_tok}
    return {
        "num_experts": moe.num_experts,
        "num_experts_per_tok": moe.num_experts_per_tok,
        "moe_intermediate_size": moe.moe_intermediate_size,
        "norm_topk_prob": moe.norm_topk_prob,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [i for i, sparse in enumerate(moe.sparse_layers) if not sparse],
    }
