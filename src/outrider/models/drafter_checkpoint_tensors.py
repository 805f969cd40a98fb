"""What becomes of every tensor of a drafter checkpoint: used, taken from the target, dropped, missing or unexpected.

``plan_tensors`` looks at names, shapes and dtypes only, so that ``outrider inspect`` and the loader say the same thing.
Names are those of ``DSparkDrafter``, which are DeepSpec's; a leading ``model.`` is dropped.

The target's embedding and head are always the ones used: full copies in the file are dropped after their shapes were
checked. A vocabulary padded beyond the target's is cut: its extra rows lose their embedding, head and Markov entries,
so that such an id can be neither proposed nor looked up. With a reduced draft vocabulary the file must bring ``d2t``
(target id = i + d2t[i]) and may bring its own head rows; without them the target's rows at these ids are used.
A confidence head in the file that the config has switched off is unexpected: whether it should run is then unclear.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

from outrider.config import DrafterConfig, ModelConfig
from outrider.errors import CheckpointError

Shape = tuple[int, ...]
EMBEDDING, HEAD, DRAFT_TO_TARGET, TARGET_TO_DRAFT = "embed_tokens.weight", "lm_head.weight", "d2t", "t2d"
_FLOATS = ("F32", "F16", "BF16")
_MARKOV_W1, _MARKOV_W2 = "markov_head.markov_w1.weight", "markov_head.markov_w2.weight"


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredTensor:
    """A tensor as the file describes it."""

    name: str  # as stored
    shape: Shape
    dtype: str  # as safetensors spells it


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorPlan:
    """Each stored tensor is in exactly one of used, dropped, unexpected and mismatched."""

    used: dict[str, StoredTensor]  # module name -> what fills it; may have more rows than the module (padding)
    derived: dict[str, str]  # module name -> where it comes from instead of the file
    dropped: dict[str, str]  # stored name -> why
    missing: dict[str, Shape]  # module name -> shape asked for
    unexpected: dict[str, Shape]  # stored name -> shape
    mismatched: dict[str, str]  # stored name -> what is wrong with it

    def raise_problems(self, source: str) -> None:
        """Refuse a checkpoint that is not accounted for both ways, naming every tensor concerned."""
        problems = list(self.mismatched.values())
        if self.missing:
            problems.append("missing: " + ", ".join(f"{name} {shape}" for name, shape in self.missing.items()))
        if self.unexpected:
            problems.append("unexpected: " + ", ".join(f"{name} {shape}" for name, shape in self.unexpected.items()))
        if problems:
            raise CheckpointError(f"{source}: drafter tensors do not fit the config: {'; '.join(problems)}")


def with_target_vocab(config: DrafterConfig, vocab_size: int) -> DrafterConfig:
    """``config`` over the target's vocabulary; rows beyond it are padding and never proposed."""
    padded = config.decoder.vocab_size
    reduced = config.draft_vocab_size < padded
    return replace(
        config,
        decoder=replace(config.decoder, vocab_size=vocab_size),
        draft_vocab_size=config.draft_vocab_size if reduced else vocab_size,
    )


def expected_tensors(config: DrafterConfig) -> dict[str, Shape]:
    """Every tensor a drafter of ``config`` owns, the target's embedding and head left out."""
    decoder, rank = config.decoder, config.markov_rank
    hidden = decoder.hidden_size
    shapes: dict[str, Shape] = {
        "fc.weight": (hidden, len(config.target_layer_ids) * hidden),
        "hidden_norm.weight": (hidden,),
        "norm.weight": (hidden,),
    }
    for layer in range(decoder.num_layers):
        shapes |= {f"layers.{layer}.{name}": shape for name, shape in _layer_tensors(decoder, layer).items()}
    if rank:
        shapes[_MARKOV_W1] = (decoder.vocab_size, rank)
        shapes[_MARKOV_W2] = (config.draft_vocab_size, rank)
        if config.markov_head_type == "gated":
            shapes |= _affine("markov_head.gate_proj", rank, hidden + rank)
        elif config.markov_head_type == "rnn":
            shapes |= _affine("markov_head.joint_proj", 3 * rank, hidden + 2 * rank)
    if config.enable_confidence_head:
        width = hidden + (rank if config.confidence_head_with_markov else 0)
        shapes |= _affine("confidence_head.proj", 1, width)
    return shapes


def _layer_tensors(decoder: ModelConfig, layer: int) -> dict[str, Shape]:
    hidden = decoder.hidden_size
    query, kv = decoder.num_heads * decoder.head_dim, decoder.num_kv_heads * decoder.head_dim
    shapes: dict[str, Shape] = {"input_layernorm.weight": (hidden,), "post_attention_layernorm.weight": (hidden,)}
    for name, rows, columns, bias in (
        ("self_attn.q_proj", query, hidden, decoder.attention_bias),
        ("self_attn.k_proj", kv, hidden, decoder.attention_bias),
        ("self_attn.v_proj", kv, hidden, decoder.attention_bias),
        ("self_attn.o_proj", hidden, query, decoder.attention_output_bias),
        *_mlp_matrices(decoder, layer),
    ):
        shapes[f"{name}.weight"] = (rows, columns)
        if bias:
            shapes[f"{name}.bias"] = (rows,)
    if decoder.qk_norm:
        shapes |= {"self_attn.q_norm.weight": (decoder.head_dim,), "self_attn.k_norm.weight": (decoder.head_dim,)}
    return shapes


def _mlp_matrices(decoder: ModelConfig, layer: int) -> Iterator[tuple[str, int, int, bool]]:
    """Name, rows, columns and bias of the layer's second half: one MLP, or a router and experts."""
    hidden, moe = decoder.hidden_size, decoder.moe
    if moe is not None and moe.sparse_layers[layer]:
        yield "mlp.gate", moe.num_experts, hidden, False
        places = [(f"mlp.experts.{expert}", moe.moe_intermediate_size, False) for expert in range(moe.num_experts)]
    else:
        places = [("mlp", decoder.intermediate_size, decoder.mlp_bias)]
    for name, inner, bias in places:
        yield f"{name}.gate_proj", inner, hidden, bias
        yield f"{name}.up_proj", inner, hidden, bias
        yield f"{name}.down_proj", hidden, inner, bias


def _affine(name: str, rows: int, columns: int) -> dict[str, Shape]:
    return {f"{name}.weight": (rows, columns), f"{name}.bias": (rows,)}


def plan_tensors(stored: Iterable[StoredTensor], config: DrafterConfig, *, target_vocab_size: int) -> TensorPlan:
    """Place every stored tensor; ``config`` is the checkpoint's own, possibly over a padded vocabulary."""
    own, padded = config.decoder.vocab_size, expected_tensors(config)
    reduced = config.draft_vocab_size < own
    by_name: dict[str, StoredTensor] = {}
    mismatched: dict[str, str] = {}
    for tensor in stored:
        name = tensor.name.removeprefix("model.")
        if name in by_name:
            mismatched[tensor.name] = f"{by_name[name].name} and {tensor.name} are the same tensor"
        else:
            by_name[name] = tensor
    vocabulary = _plan_vocabulary(by_name, config, mismatched, reduced=reduced)
    used, derived, dropped, missing = vocabulary.used, vocabulary.derived, vocabulary.dropped, vocabulary.missing
    for name, shape in padded.items():
        found = by_name.pop(name, None)
        if found is None:
            missing[name] = shape
        elif _fits(found, shape, _FLOATS, mismatched):
            used[name] = found
    for name in [name for name in by_name if name.endswith("rotary_emb.inv_freq")]:
        dropped[by_name.pop(name).name] = "rotary table, computed from the config"
    if own > target_vocab_size:
        for name in (_MARKOV_W1, _MARKOV_W2) if not reduced else (_MARKOV_W1,):
            if name in used:
                derived[f"{name} (rows)"] = f"first {target_vocab_size} of {own}; the rest pads the vocabulary"
    return TensorPlan(
        used=used,
        derived=derived,
        dropped=dropped,
        missing=missing,
        unexpected={tensor.name: tensor.shape for tensor in by_name.values()},
        mismatched=mismatched,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Vocabulary:
    used: dict[str, StoredTensor]
    derived: dict[str, str]
    dropped: dict[str, str]
    missing: dict[str, Shape]


def _plan_vocabulary(
    by_name: dict[str, StoredTensor], config: DrafterConfig, mismatched: dict[str, str], *, reduced: bool
) -> _Vocabulary:
    """Embedding, head and vocabulary maps; takes what it placed out of ``by_name``."""
    hidden, own = config.decoder.hidden_size, config.decoder.vocab_size
    plan = _Vocabulary(used={}, derived={}, dropped={}, missing={})
    plan.derived[EMBEDDING] = "the target's embedding"
    embedding = by_name.pop(EMBEDDING, None)
    if embedding is not None and _fits(embedding, (own, hidden), _FLOATS, mismatched):
        plan.dropped[embedding.name] = "copy of the target's embedding"
    head = by_name.pop(HEAD, None)
    if not reduced:
        plan.derived[HEAD] = "the target's head"
        if head is not None and _fits(head, (own, hidden), _FLOATS, mismatched):
            plan.dropped[head.name] = "copy of the target's head"
        return plan
    rows = config.draft_vocab_size
    if head is None:
        plan.derived[HEAD] = f"{rows} rows of the target's head, by d2t"
    elif _fits(head, (rows, hidden), _FLOATS, mismatched):
        plan.used[HEAD] = head
    offsets = by_name.pop(DRAFT_TO_TARGET, None)
    if offsets is None:
        plan.missing[DRAFT_TO_TARGET] = (rows,)
    elif _fits(offsets, (rows,), ("I64", "I32"), mismatched):
        plan.used[DRAFT_TO_TARGET] = offsets
    flags = by_name.pop(TARGET_TO_DRAFT, None)
    if flags is not None and _fits(flags, (own,), ("BOOL",), mismatched):
        plan.dropped[flags.name] = "follows from d2t"
    return plan


def _fits(tensor: StoredTensor, shape: Shape, dtypes: tuple[str, ...], mismatched: dict[str, str]) -> bool:
    if tensor.shape != shape:
        mismatched[tensor.name] = f"{tensor.name} has shape {tensor.shape}, but the config asks for {shape}"
    elif tensor.dtype not in dtypes:
        mismatched[tensor.name] = f"{tensor.name} has dtype {tensor.dtype}, but {' or '.join(dtypes)} is needed"
    else:
        return True
    return False
