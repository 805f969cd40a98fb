"""Small models with known answers, written as ordinary checkpoint directories.

Every ``make_*`` function fills one directory (made if missing) and returns it: ``config.json``, ``model.safetensors``
and, for targets, a character tokenizer with a trivial chat template, so that the loaders, the engine, the command
line and the server run on it like on a downloaded model. The files are written here from plain tensors, not through
the project's own writers, so that a loader is never tested against its own inverse alone.

Shape: vocabulary 64, a 4-layer Qwen3-shaped target (hidden 64, 4 heads, 2 KV heads of 16, untied head), a 2-layer
drafter (7 draft tokens, Markov rank 16) that taps target layers 0 and 2.

    CYCLE    target whose next token is (7 t + 3) mod 61 of the last one, top-2 gap 8 (30 is its only fixed point)
    LAYERED  the same map, but every layer permutes its one-hot state, so that the layers' outputs differ
    RAND     random target and drafter
    FIXED    target and drafter whose distribution is the same at every position
    PERFECT  Markov-only drafter that always proposes CYCLE's token;  WRONG never does;
    HALF     is right except after a token at orbit index 3 mod 4
    CONTEXT  drafter of LAYERED that knows nothing but what attention finds ``lookback`` positions back in the features
    MOE      random Qwen3-MoE target (8 experts, 2 a token, first layer dense) and drafter, both with uneven routers
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers
from torch import Tensor

VOCAB = 64
HIDDEN = 64
LAYERS = 4
HEADS = 4
KV_HEADS = 2
HEAD_DIM = 16
INTERMEDIATE = 128
CYCLE = 61  # tokens 0..60 are the characters; CYCLE's map never leaves them
TURN_ID, MASK_ID, EOS_ID = 61, 62, 63
DRAFT_LAYERS = 2
GAMMA = 7
MARKOV_RANK = 16
TARGET_LAYER_IDS = (0, 2)
ROPE_THETA = 10000.0
MOE: dict[str, Any] = {
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
}
MAX_POSITIONS = 1024

CHARACTERS = "abcdefghijklmnopqrstuvwxyz0123456789 \n{}[]\":,.-_'!?()+*/=<>|\\"
SPECIAL_TOKENS = ("<|turn|>", "<|mask|>", "<|end|>")
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<|turn|>' + message['role'] + '\n' + message['content'] + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|turn|>assistant\n' }}{% endif %}"
)

TensorDict = dict[str, Tensor]


def next_token(token_id: int) -> int:
    """CYCLE's map: what greedily follows ``token_id``."""
    return (7 * token_id + 3) % CYCLE


def _orbit() -> tuple[int, ...]:
    orbit = [0]
    while (following := next_token(orbit[-1])) != orbit[0]:
        orbit.append(following)
    return tuple(orbit)


ORBIT = _orbit()  # 60 tokens, beginning with token 0 at orbit index 0


def orbit_prompt(length: int, *, first_generated_index: int = 0) -> list[int]:
    """A prompt of ``length`` tokens along the orbit; CYCLE continues it with ``ORBIT[first_generated_index % 60]``."""
    return [ORBIT[(first_generated_index - length + i) % len(ORBIT)] for i in range(length)]


def continuation(prompt: Sequence[int], length: int) -> list[int]:
    """What CYCLE and LAYERED greedily generate after ``prompt``."""
    token_ids, last = [], prompt[-1]
    for _ in range(length):
        last = next_token(last)
        token_ids.append(last)
    return token_ids


# ---------------------------------------------------------------------------------------------------- targets


def make_cycle_target(path: Path) -> Path:
    """CYCLE: one-hot embeddings, residual branches zeroed, head permuted."""
    tensors = _random_target_tensors(seed=1)
    for layer in range(LAYERS):
        tensors[f"model.layers.{layer}.self_attn.o_proj.weight"].zero_()
        tensors[f"model.layers.{layer}.mlp.down_proj.weight"].zero_()
    tensors["model.embed_tokens.weight"] = torch.eye(VOCAB, HIDDEN)
    tensors["lm_head.weight"] = _one_hot_map({token: next_token(token) for token in range(VOCAB)})
    return write_target(path, tensors)


def make_layered_target(path: Path) -> Path:
    """LAYERED: layer i turns the one-hot state of token t from ``state(t, i)`` to ``state(t, i + 1)``; head to match.

    The MLP sees 8 * one-hot(s) after its norm; with identity gate and up rows only unit s is active, so that the
    down projection is a lookup table, here one-hot(s') - one-hot(s).
    """
    tensors = _random_target_tensors(seed=2)
    rms = math.sqrt(1 / HIDDEN + 1e-6)
    active = 1 / rms * torch.sigmoid(torch.tensor(1 / rms)).item() * (1 / rms)
    step = _one_hot_map({s: _permute(s) for s in range(HIDDEN)}) - torch.eye(HIDDEN)
    for layer in range(LAYERS):
        prefix = f"model.layers.{layer}."
        tensors[prefix + "self_attn.o_proj.weight"].zero_()
        tensors[prefix + "post_attention_layernorm.weight"].fill_(1.0)
        tensors[prefix + "mlp.gate_proj.weight"] = torch.eye(INTERMEDIATE, HIDDEN)
        tensors[prefix + "mlp.up_proj.weight"] = torch.eye(INTERMEDIATE, HIDDEN)
        tensors[prefix + "mlp.down_proj.weight"].zero_()
        tensors[prefix + "mlp.down_proj.weight"][:, :HIDDEN] = step / active
    tensors["model.embed_tokens.weight"] = torch.eye(VOCAB, HIDDEN)
    tensors["lm_head.weight"] = torch.zeros(VOCAB, HIDDEN)
    for token in range(VOCAB):
        tensors["lm_head.weight"][next_token(token), layered_state(token, LAYERS)] = 1.0
    return write_target(path, tensors)


def layered_state(token_id: int, layers: int) -> int:
    """Index of LAYERED's one-hot residual of ``token_id`` after ``layers`` layers (0: the embedding)."""
    state = token_id
    for _ in range(layers):
        state = _permute(state)
    return state


def make_rand_target(path: Path, *, seed: int = 3) -> Path:
    return write_target(path, _random_target_tensors(seed=seed))


def make_moe_target(path: Path, *, seed: int = 9, **config_changes: Any) -> Path:
    """MOE: as RAND, with experts in all layers but the first; some are chosen far more often than others."""
    moe: dict[str, Any] = {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        **MOE,
        "mlp_only_layers": [0],
    }
    tensors = _random_target_tensors(seed=seed)
    _replace_mlps(tensors, range(1, LAYERS), prefix="model.", seed=seed)
    return write_target(path, tensors, **{**moe, **config_changes})


def make_fixed_target(path: Path, *, probabilities: Mapping[int, float], floor_logit: float = -30.0) -> Path:
    """FIXED: the logits are log p of ``probabilities`` at every position, ``floor_logit`` on every other token."""
    tensors = _random_target_tensors(seed=4)
    for layer in range(LAYERS):
        tensors[f"model.layers.{layer}.self_attn.o_proj.weight"].zero_()
        tensors[f"model.layers.{layer}.mlp.down_proj.weight"].zero_()
    rms = math.sqrt(1 / HIDDEN + 1e-6)
    tensors["model.embed_tokens.weight"] = torch.zeros(VOCAB, HIDDEN)
    tensors["model.embed_tokens.weight"][:, 0] = 1.0
    tensors["lm_head.weight"] = torch.zeros(VOCAB, HIDDEN)
    tensors["lm_head.weight"][:, 0] = _fixed_logits(probabilities, floor_logit) * rms
    return write_target(path, tensors)


def _random_target_tensors(*, seed: int) -> TensorDict:
    generator = torch.Generator().manual_seed(seed)
    tensors = {
        "model.embed_tokens.weight": torch.randn(VOCAB, HIDDEN, generator=generator),
        "model.norm.weight": torch.ones(HIDDEN),
        "lm_head.weight": torch.randn(VOCAB, HIDDEN, generator=generator) * 0.3,
    }
    for layer in range(LAYERS):
        tensors |= {f"model.{name}": tensor for name, tensor in _layer_tensors(layer, generator).items()}
    return tensors


def target_config(**changes: Any) -> dict[str, Any]:
    """The targets' ``config.json``."""
    return {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "vocab_size": VOCAB,
        "hidden_size": HIDDEN,
        "intermediate_size": INTERMEDIATE,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD_DIM,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "rope_theta": ROPE_THETA,
        "max_position_embeddings": MAX_POSITIONS,
        "attention_bias": False,
        "tie_word_embeddings": False,
        "use_sliding_window": False,
        "sliding_window": None,
        "eos_token_id": EOS_ID,
        "dtype": "float32",
        **changes,
    }


def write_target(path: Path, tensors: TensorDict, **config_changes: Any) -> Path:
    write_checkpoint(path, target_config(**config_changes), tensors)
    write_tokenizer(path)
    return path


# ---------------------------------------------------------------------------------------------------- drafters


def make_perfect_drafter(path: Path, **config_changes: Any) -> Path:
    """PERFECT: proposes what CYCLE says after the previous token, whatever the context."""
    return _make_markov_drafter(path, next_token, config_changes)


def make_wrong_drafter(path: Path, **config_changes: Any) -> Path:
    """WRONG: proposes another token than CYCLE at every slot."""
    return _make_markov_drafter(path, lambda token: (next_token(token) + 1) % CYCLE, config_changes)


def make_half_drafter(path: Path, **config_changes: Any) -> Path:
    """HALF: as PERFECT, but wrong after a token at orbit index 3 mod 4: anchors at index 0 mod 4 accept 3 drafts."""
    index = {token: i for i, token in enumerate(ORBIT)}

    def proposal(token: int) -> int:
        i = index.get(token)
        # four ahead: the map stays one-to-one, which keeps the Markov codes apart
        return next_token(token) if i is None or i % 4 != 3 else ORBIT[(i + 5) % len(ORBIT)]

    return _make_markov_drafter(path, proposal, config_changes)


def make_random_drafter(path: Path, *, seed: int = 5, **config_changes: Any) -> Path:
    config = drafter_config(**config_changes)
    return write_checkpoint(path, config, random_drafter_tensors(config, seed=seed))


def make_moe_drafter(path: Path, *, seed: int = 10, **config_changes: Any) -> Path:
    """MOE: as RAND, with experts in both layers, so that a draft pass needs all ranks."""
    config = drafter_config(**{"model_type": "qwen3_moe", **MOE, **config_changes})
    tensors = random_drafter_tensors(config, seed=seed)
    _replace_mlps(tensors, range(DRAFT_LAYERS), prefix="", seed=seed)
    return write_checkpoint(path, config, tensors)


def make_fixed_drafter(path: Path, *, probabilities: Mapping[int, float], floor_logit: float = -30.0) -> Path:
    """FIXED: proposes from ``probabilities`` at every slot."""
    config = drafter_config()
    tensors = _without_backbone(random_drafter_tensors(config, seed=6))
    tensors["markov_head.markov_w1.weight"] = torch.zeros(VOCAB, MARKOV_RANK)
    tensors["markov_head.markov_w1.weight"][:, 0] = 1.0
    tensors["markov_head.markov_w2.weight"] = torch.zeros(VOCAB, MARKOV_RANK)
    tensors["markov_head.markov_w2.weight"][:, 0] = _fixed_logits(probabilities, floor_logit)
    return write_checkpoint(path, config, tensors)


def make_context_drafter(path: Path, *, lookback: int = 8, **config_changes: Any) -> Path:
    """CONTEXT, for LAYERED: slot k reads the token x at position p + k - ``lookback`` and proposes f^(lookback+1)(x).

    Hand-built. Queries and keys are the same constant vectors for every row, so that attention depends on rotary
    position alone and peaks ``lookback`` positions back. ``fc`` turns the state of tapped layer 0 into x // 8 and that
    of tapped layer 2 into x % 8; draft layer 0 copies the former (query head 0, KV head 0) and layer 1 the latter
    (query head 3, KV head 1), each onto all states it is compatible with: only the right one gets both votes. Both
    taps, both layers, every position and the slot numbering must be right for a correct proposal.

    ``lookback`` >= 7 keeps every slot's position inside the context (at 7 the last slot reads its newest position); the
    prompt must be at least ``lookback`` long and lie on the orbit for all proposals to be right.
    """
    assert lookback >= GAMMA, f"lookback={lookback} must be at least {GAMMA}, or slots would look into their own block"
    config = drafter_config(**config_changes)
    tensors = random_drafter_tensors(config, seed=7)
    for name in ("markov_head.markov_w1.weight", "markov_head.markov_w2.weight"):
        tensors[name].zero_()
    tensors["fc.weight"].zero_()
    for tap, layer_id in enumerate(TARGET_LAYER_IDS):
        for token in range(VOCAB):
            code = 8 * tap + (token // 8 if tap == 0 else token % 8)
            tensors["fc.weight"][code, tap * HIDDEN + layered_state(token, layer_id + 1)] = 1.0
    query, key = _positional_query_and_key(lookback)
    for layer in range(DRAFT_LAYERS):
        prefix = f"layers.{layer}."
        attention = prefix + "self_attn."
        tensors[attention + "q_proj.weight"] = query.repeat(HEADS)[:, None].expand(-1, HIDDEN).contiguous()
        tensors[attention + "k_proj.weight"] = key.repeat(KV_HEADS)[:, None].expand(-1, HIDDEN).contiguous()
        tensors[attention + "q_norm.weight"].fill_(20.0)
        tensors[attention + "k_norm.weight"].fill_(20.0)
        tensors[prefix + "mlp.down_proj.weight"].zero_()
        value, output = tensors[attention + "v_proj.weight"].zero_(), tensors[attention + "o_proj.weight"].zero_()
        kv_head, query_head = (0, 0) if layer == 0 else (1, 3)
        for code in range(8):
            value[kv_head * HEAD_DIM + code, 8 * layer + code] = 1.0
        for token in range(CYCLE):
            code = token // 8 if layer == 0 else token % 8
            before_proposal = continuation([token], lookback)[-1]
            # 100: far above the block's own embedding in the residual, so that the anchor itself votes for nothing
            output[layered_state(before_proposal, LAYERS), query_head * HEAD_DIM + code] = 100.0
    tensors["norm.weight"].fill_(8.0)
    return write_checkpoint(path, config, tensors)


def _positional_query_and_key(distance: int) -> tuple[Tensor, Tensor]:
    """[HEAD_DIM] each: after half-split rotation their product is sum_f cos(theta_f (i - j - distance))."""
    half = HEAD_DIM // 2
    angles = distance * ROPE_THETA ** (-torch.arange(half, dtype=torch.float64) / half)
    query = torch.cat((torch.ones(half), torch.zeros(half)))
    # rotating the query by i and the key by j turns their angle by i - j; start the key ``distance`` ahead
    key = torch.cat((torch.cos(angles), torch.sin(angles))).float()
    return query, key


def _make_markov_drafter(path: Path, proposal: Callable[[int], int], config_changes: Mapping[str, Any]) -> Path:
    config = drafter_config(**config_changes)
    tensors = _without_backbone(random_drafter_tensors(config, seed=8))
    codes = torch.nn.functional.normalize(
        torch.randn(CYCLE, MARKOV_RANK, generator=torch.Generator().manual_seed(8)), dim=-1
    )
    w1, w2 = torch.zeros(VOCAB, MARKOV_RANK), torch.zeros(VOCAB, MARKOV_RANK)
    for token in range(VOCAB):
        w1[token] = codes[token % CYCLE]
    for token in range(CYCLE):
        w2[proposal(token)] += 30 * codes[token]
    tensors |= {"markov_head.markov_w1.weight": w1, "markov_head.markov_w2.weight": w2}
    return write_checkpoint(path, config, tensors)


def _without_backbone(tensors: TensorDict) -> TensorDict:
    """Zero base logits: a zero final norm leaves nothing for the head to see."""
    tensors["norm.weight"].zero_()
    return tensors


def random_drafter_tensors(config: Mapping[str, Any], *, seed: int) -> TensorDict:
    """Tensors of a drafter with ``config`` (DeepSpec names, without embedding and head copies)."""
    generator = torch.Generator().manual_seed(seed)
    rank, features = config["markov_rank"], len(config["target_layer_ids"]) * HIDDEN

    def matrix(rows: int, columns: int) -> Tensor:
        return torch.randn(rows, columns, generator=generator) / math.sqrt(columns)

    tensors = {
        "fc.weight": matrix(HIDDEN, features),
        "hidden_norm.weight": torch.ones(HIDDEN),
        "norm.weight": torch.ones(HIDDEN),
    }
    for layer in range(config["num_hidden_layers"]):
        tensors |= _layer_tensors(layer, generator)
    if rank:
        tensors["markov_head.markov_w1.weight"] = torch.randn(VOCAB, rank, generator=generator)
        tensors["markov_head.markov_w2.weight"] = torch.randn(VOCAB, rank, generator=generator) * 0.3
        if config["markov_head_type"] == "gated":
            tensors["markov_head.gate_proj.weight"] = matrix(rank, HIDDEN + rank)
            tensors["markov_head.gate_proj.bias"] = matrix(1, rank)[0]
        if config["markov_head_type"] == "rnn":
            tensors["markov_head.joint_proj.weight"] = matrix(3 * rank, HIDDEN + 2 * rank)
            tensors["markov_head.joint_proj.bias"] = matrix(1, 3 * rank)[0]
    if config["enable_confidence_head"]:
        width = HIDDEN + (rank if config["confidence_head_with_markov"] else 0)
        tensors["confidence_head.proj.weight"] = matrix(1, width)
        tensors["confidence_head.proj.bias"] = torch.full((1,), 0.5)
    return tensors


def drafter_config(**changes: Any) -> dict[str, Any]:
    """The drafters' ``config.json``, DeepSpec format."""
    return {
        "architectures": ["Qwen3DSparkModel"],
        "model_type": "qwen3",
        "vocab_size": VOCAB,
        "hidden_size": HIDDEN,
        "intermediate_size": INTERMEDIATE,
        "num_hidden_layers": DRAFT_LAYERS,
        "num_target_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD_DIM,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "rope_theta": ROPE_THETA,
        "max_position_embeddings": MAX_POSITIONS,
        "attention_bias": False,
        "tie_word_embeddings": False,
        "layer_types": ["full_attention"] * DRAFT_LAYERS,
        "block_size": GAMMA,
        "target_layer_ids": list(TARGET_LAYER_IDS),
        "mask_token_id": MASK_ID,
        "markov_rank": MARKOV_RANK,
        "markov_head_type": "vanilla",
        "enable_confidence_head": True,
        "confidence_head_with_markov": True,
        "dtype": "float32",
        **changes,
    }


# ---------------------------------------------------------------------------------------------------- shared parts


def write_checkpoint(path: Path, config: Mapping[str, Any], tensors: TensorDict) -> Path:
    path.mkdir(parents=True, exist_ok=True)
    (path / "config.json").write_text(json.dumps(config, indent=2), encoding="utf-8")
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, path / "model.safetensors")
    return path


def make_tokenizer() -> Tokenizer:
    """64 tokens: 61 characters and 3 specials. Lower-cases; a character it does not know becomes "?"."""
    vocabulary = {character: i for i, character in enumerate(CHARACTERS)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[], unk_token="?"))
    tokenizer.normalizer = normalizers.Lowercase()
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL_TOKENS])
    return tokenizer


def write_tokenizer(path: Path) -> None:
    path.mkdir(parents=True, exist_ok=True)
    make_tokenizer().save(str(path / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": SPECIAL_TOKENS[2],
        "clean_up_tokenization_spaces": False,
        "model_max_length": MAX_POSITIONS,
        "chat_template": CHAT_TEMPLATE,
    }
    (path / "tokenizer_config.json").write_text(json.dumps(config, indent=2), encoding="utf-8")


def _layer_tensors(layer: int, generator: torch.Generator) -> TensorDict:
    def matrix(rows: int, columns: int) -> Tensor:
        return torch.randn(rows, columns, generator=generator) / math.sqrt(columns)

    prefix = f"layers.{layer}."
    return {
        prefix + "input_layernorm.weight": torch.ones(HIDDEN),
        prefix + "post_attention_layernorm.weight": torch.ones(HIDDEN),
        prefix + "self_attn.q_proj.weight": matrix(HEADS * HEAD_DIM, HIDDEN),
        prefix + "self_attn.k_proj.weight": matrix(KV_HEADS * HEAD_DIM, HIDDEN),
        prefix + "self_attn.v_proj.weight": matrix(KV_HEADS * HEAD_DIM, HIDDEN),
        prefix + "self_attn.o_proj.weight": matrix(HIDDEN, HEADS * HEAD_DIM),
        prefix + "self_attn.q_norm.weight": torch.ones(HEAD_DIM),
        prefix + "self_attn.k_norm.weight": torch.ones(HEAD_DIM),
        prefix + "mlp.gate_proj.weight": matrix(INTERMEDIATE, HIDDEN),
        prefix + "mlp.up_proj.weight": matrix(INTERMEDIATE, HIDDEN),
        prefix + "mlp.down_proj.weight": matrix(HIDDEN, INTERMEDIATE),
    }


def _replace_mlps(tensors: TensorDict, layers: Sequence[int], *, prefix: str, seed: int) -> None:
    """Experts and routers instead of the MLPs of ``layers``; the router's rows grow, so that late experts win often."""
    generator = torch.Generator().manual_seed(seed)
    experts, inner = MOE["num_experts"], MOE["moe_intermediate_size"]
    for layer in layers:
        mlp = f"{prefix}layers.{layer}.mlp."
        for name in ("gate_proj", "up_proj", "down_proj"):
            del tensors[f"{mlp}{name}.weight"]
        router = torch.randn(experts, HIDDEN, generator=generator) / math.sqrt(HIDDEN)
        tensors[mlp + "gate.weight"] = router * torch.linspace(0.5, 3.0, experts)[:, None]
        for expert in range(experts):
            for name, rows, columns in (
                ("gate_proj", inner, HIDDEN), ("up_proj", inner, HIDDEN), ("down_proj", HIDDEN, inner),
            ):  # fmt: skip
                weight = torch.randn(rows, columns, generator=generator) / math.sqrt(columns)
                tensors[f"{mlp}experts.{expert}.{name}.weight"] = weight


def _permute(state: int) -> int:
    return (5 * state + 11) % HIDDEN


def _one_hot_map(table: Mapping[int, int]) -> Tensor:
    """[VOCAB, HIDDEN] with a one at (table[i], i)."""
    matrix = torch.zeros(VOCAB, HIDDEN)
    for source, destination in table.items():
        matrix[destination, source] = 1.0
    return matrix


def _fixed_logits(probabilities: Mapping[int, float], floor_logit: float) -> Tensor:
    logits = torch.full((VOCAB,), floor_logit)
    for token, probability in probabilities.items():
        logits[token] = math.log(probability)
    return logits
