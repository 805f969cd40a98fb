"""A drafter's ``config.json``, read into the one normal form and written back in each of the three formats.

DeepSpec keeps every field at the top level. SpecForge nests the DSpark fields in ``dflash_config``; its relatives
prefix them with ``dspark_``. speculators keeps the layers' shape in ``transformer_layer_config``, counts tapped layers
from the embedding (one more than here) and, where slot 0 is unused, counts it in ``block_size``. A field is looked up
prefixed, then nested, then at the top level. What this engine does not compute is refused here by name.

Fields that formats leave out: ``sample_from_anchor`` is true. speculators defines that default in its DSpark class,
while one widely used reader of its checkpoints takes a missing key for false: with that reading every proposal is
shifted by one position and only the acceptance shows it. The other defaults differ between formats (Markov rank 256 in
speculators, 0 in SpecForge), so each format's own is used; a wrong guess cannot pass, since tensors are accounted for
both ways.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, cast, get_args

from outrider.config import DrafterConfig, MarkovHeadType, ModelConfig
from outrider.errors import CheckpointError, ConfigError
from outrider.models.model_config import SUPPORTED_MODEL_TYPES, from_hf
from outrider.models.model_config_json import model_config_to_json
from outrider.models.source import read_json

DrafterFormat = Literal["deepspec", "speculators", "specforge"]
_LAYER_TYPES = ("llama", "qwen3", "qwen3_moe")
_DENSE = ("llama", "qwen3")
# What ``from_hf`` reads of a dense model and transformers has defaults for.
_WITH_DEFAULTS = frozenset((
    "hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim", "intermediate_size",
    "vocab_size", "hidden_act", "rms_norm_eps", "rope_parameters", "max_position_embeddings", "attention_bias",
    "mlp_bias", "tie_word_embeddings", "layer_types", "bos_token_id", "eos_token_id",
))  # fmt: skip
_PREFIX = "dspark_"
_NESTED = ("dflash_config", "dspark_config")


def read_drafter_config(source: Path | str | Mapping[str, Any]) -> DrafterConfig:
    """The normal form of a checkpoint directory's ``config.json``, of that file itself, or of its content."""
    if isinstance(source, Mapping):
        return _read(source, name="drafter config")
    path = Path(source)
    path = path / "config.json" if path.is_dir() else path
    return _read(read_json(path), name=str(path))


def _read(raw: Mapping[str, Any], *, name: str) -> DrafterConfig:
    try:
        fields = _Fields(raw, detect_format(raw))
        _refuse_unsupported(fields)
        decoder = _decoder(fields)
        return _normal_form(fields, decoder)
    except ConfigError as error:
        raise CheckpointError(f"{name}: {error}") from error


def detect_format(raw: Mapping[str, Any]) -> DrafterFormat:
    """By ``speculators_model_type``, then any prefixed or nested DSpark key, else flat."""
    model_type = raw.get("speculators_model_type")
    if model_type is not None:
        if model_type != "dspark":
            raise ConfigError(f"speculators_model_type={model_type!r} is not supported; supported: 'dspark'")
        return "speculators"
    if raw.get("model_type") == "deepseek_v4" or "dspark_noise_token_id" in raw or "n_mtp_layers" in raw:
        raise ConfigError(
            f"model_type={raw.get('model_type')!r} with a drafter bundled as mtp.* tensors (DeepSeek-V4) is not "
            "supported; supported: DeepSpec, speculators and SpecForge checkpoints of dense drafters"
        )
    if any(key.startswith(_PREFIX) or key in _NESTED for key in raw):
        return "specforge"
    return "deepspec"


class _Fields:
    """Look-up of one field: prefixed, then nested, then at the top level. ``None`` counts as absent."""

    def __init__(self, raw: Mapping[str, Any], source_format: DrafterFormat) -> None:
        self.raw = raw
        self.source_format: DrafterFormat = source_format
        self.nested: dict[str, Any] = {}
        for key in reversed(_NESTED):
            value = raw.get(key) or {}
            if not isinstance(value, Mapping):
                raise ConfigError(f"{key}={value!r} must be an object")
            self.nested |= value

    def get(self, key: str) -> Any:
        for scope, scoped_key in ((self.raw, _PREFIX + key), (self.nested, key), (self.raw, key)):
            if scope.get(scoped_key) is not None:
                return scope[scoped_key]
        return None

    def integer(self, key: str, *, default: int | None = None) -> int:
        value = self.get(key)
        if value is None and default is not None:
            return default
        if value is None:
            raise ConfigError(f"{key} is missing; a {self.source_format} drafter must give it")
        if isinstance(value, bool) or not isinstance(value, int):
            raise ConfigError(f"{key}={value!r} must be an integer")
        return value

    def boolean(self, key: str, *, default: bool) -> bool:
        value = self.get(key)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise ConfigError(f"{key}={value!r} must be true or false")
        return value

    def integers(self, key: str) -> tuple[int, ...]:
        value = self.get(key)
        if value is None:
            raise ConfigError(f"{key} is missing; a {self.source_format} drafter must give it")
        if not isinstance(value, list) or any(isinstance(i, bool) or not isinstance(i, int) for i in value):
            raise ConfigError(f"{key}={value!r} must be a list of integers")
        return tuple(value)


def _refuse_unsupported(fields: _Fields) -> None:
    """What is named in a config but would not be computed."""
    projector = fields.get("projector_type")
    if projector is not None and projector != "dspark":
        raise ConfigError(f"projector_type={projector!r} is not supported; supported: 'dspark'")
    names = ", ".join(map(str, _listed(fields.raw, "architectures")))
    if fields.nested and projector is None and "dspark" not in names.lower() and fields.get("markov_rank") is None:
        raise ConfigError(
            f"architectures=[{names}] with dflash_config but neither projector_type='dspark' nor markov_rank is a "
            "DFlash drafter, which is not supported"
        )
    for key in ("is_causal", "causal"):
        if fields.get(key):
            raise ConfigError(f"{key}={fields.get(key)} is not supported; blocks attend in both directions")
    for key in ("pure_draft_prefix_len", "shift_label"):
        if fields.get(key):
            raise ConfigError(f"{key}={fields.get(key)} is not supported; it must be absent, 0 or false")


def _decoder(fields: _Fields) -> ModelConfig:
    shape = dict(fields.raw)
    if fields.source_format == "speculators":
        nested = fields.raw.get("transformer_layer_config")
        if not isinstance(nested, Mapping):
            raise ConfigError(f"transformer_layer_config={nested!r} must be an object")
        shape = {"model_type": "qwen3", **nested}
    model_type = shape.get("model_type")
    if not isinstance(model_type, str) or model_type not in _LAYER_TYPES:
        raise ConfigError(
            f"model_type={model_type!r} of the draft layers is not supported; supported: {', '.join(_LAYER_TYPES)}"
        )
    if fields.source_format == "speculators" and not (model_type in _DENSE and shape.keys() >= _WITH_DEFAULTS):
        shape = _with_class_defaults(shape)
    # Only the layers' kind matters: drafters are named after themselves, or generically.
    decoder = from_hf({**shape, "architectures": [SUPPORTED_MODEL_TYPES[model_type]]})
    layer_types = _listed(shape, "layer_types")
    if layer_types and len(layer_types) != decoder.num_layers:
        raise ConfigError(f"layer_types has {len(layer_types)} entries for num_hidden_layers={decoder.num_layers}")
    attention_mode = fields.get("attention_mode")
    expected = "mha" if decoder.num_kv_heads == decoder.num_heads else "gqa"
    if attention_mode is not None and attention_mode != expected:
        raise ConfigError(
            f"attention_mode={attention_mode!r} does not fit num_attention_heads={decoder.num_heads} and "
            f"num_key_value_heads={decoder.num_kv_heads}, which make it {expected!r}"
        )
    return decoder


def _listed(raw: Mapping[str, Any], key: str) -> list[Any]:
    value = raw.get(key)
    if value is not None and not isinstance(value, list):
        raise ConfigError(f"{key}={value!r} must be a list")
    return value or []


def _with_class_defaults(shape: Mapping[str, Any]) -> dict[str, Any]:
    """speculators stores only what differs from the defaults of transformers' config class: put those back."""
    from transformers import AutoConfig  # a slow import that complete configs do without

    values = {key: value for key, value in shape.items() if key not in ("model_type", "architectures")}
    try:
        filled: dict[str, Any] = AutoConfig.for_model(shape["model_type"], **values).to_dict()
    except Exception as error:  # transformers validates with exceptions of several libraries
        raise ConfigError(f"transformer_layer_config is malformed: {error}") from error
    return filled


def _normal_form(fields: _Fields, decoder: ModelConfig) -> DrafterConfig:
    source_format = fields.source_format
    speculators = source_format == "speculators"
    head_type = fields.get("markov_head_type") or "vanilla"
    if head_type not in get_args(MarkovHeadType):
        raise ConfigError(f"markov_head_type={head_type!r} must be one of {', '.join(get_args(MarkovHeadType))}")
    from_anchor = fields.boolean("sample_from_anchor", default=True)
    if head_type == "rnn" and not from_anchor:
        raise ConfigError(
            "markov_head_type='rnn' with sample_from_anchor=false is not supported: its state passes through the "
            "unused slot 0; supported: vanilla and gated"
        )
    gamma = fields.integer("block_size") - (0 if from_anchor else 1)
    if speculators:
        layer_ids = tuple(i - 1 for i in fields.integers("aux_hidden_state_layer_ids"))
        _check_proposal_methods(fields, gamma)
    else:
        layer_ids = fields.integers("target_layer_ids")
    if any(i < -1 for i in layer_ids):
        raise ConfigError(f"target_layer_ids={list(layer_ids)} must be at least -1 (the embedding output)")
    if len(set(layer_ids)) != len(layer_ids):
        raise ConfigError(f"target_layer_ids={list(layer_ids)} names a layer twice")
    target_hidden = fields.get("target_hidden_size")
    if target_hidden is not None and target_hidden != decoder.hidden_size:
        raise ConfigError(
            f"target_hidden_size={target_hidden} differs from the drafter's hidden_size={decoder.hidden_size}; "
            "drafters of another width than their target are not supported"
        )
    confidence_default = speculators or bool(fields.get("confidence_head_alpha"))
    enable_confidence = fields.boolean("enable_confidence_head", default=confidence_default)
    with_markov = fields.boolean("confidence_head_with_markov", default=speculators)
    return DrafterConfig(
        source_format=source_format,
        decoder=decoder,
        num_speculative_tokens=gamma,
        sample_from_anchor=from_anchor,
        target_layer_ids=layer_ids,
        num_target_layers=fields.integer("num_target_layers", default=0),
        mask_token_id=fields.integer("mask_token_id"),
        markov_rank=fields.integer("markov_rank", default=256 if speculators else 0),
        markov_head_type=cast("MarkovHeadType", head_type),
        enable_confidence_head=enable_confidence,
        confidence_head_with_markov=enable_confidence and with_markov,
        draft_vocab_size=fields.integer("draft_vocab_size", default=decoder.vocab_size),
    )


def _check_proposal_methods(fields: _Fields, gamma: int) -> None:
    """speculators repeats gamma in its proposal methods, where a smaller figure only advises shorter drafting."""
    section = fields.raw.get("speculators_config") or {}
    if not isinstance(section, Mapping):
        raise ConfigError(f"speculators_config={section!r} must be an object")
    for method in _listed(section, "proposal_methods"):
        tokens = method.get("speculative_tokens") if isinstance(method, Mapping) else None
        if isinstance(tokens, int) and tokens > gamma:
            raise ConfigError(
                f"speculators_config.proposal_methods: speculative_tokens={tokens} exceeds the {gamma} of block_size"
            )


def drafter_config_to_json(config: DrafterConfig, source_format: DrafterFormat, *, dtype: str) -> dict[str, Any]:
    """The content of ``config.json`` in ``source_format``; reading it gives ``config`` back.

    What a format has no word for is refused: DeepSpec and SpecForge know neither a reduced draft vocabulary nor slot 0
    being unused.
    """
    shape = model_config_to_json(config.decoder) | {"dtype": dtype}
    heads = {
        "markov_rank": config.markov_rank,
        "markov_head_type": config.markov_head_type,
        "enable_confidence_head": config.enable_confidence_head,
        "confidence_head_with_markov": config.confidence_head_with_markov,
    }
    if source_format == "speculators":
        return _speculators_json(config, shape, heads)
    if config.draft_vocab_size != config.decoder.vocab_size:
        raise ConfigError(
            f"draft_vocab_size={config.draft_vocab_size} below vocab_size={config.decoder.vocab_size} cannot be "
            f"written as {source_format}; use speculators"
        )
    if not config.sample_from_anchor:
        raise ConfigError(f"sample_from_anchor=false cannot be written as {source_format}; use speculators")
    features = {"target_layer_ids": list(config.target_layer_ids), "mask_token_id": config.mask_token_id}
    common = {"num_target_layers": config.num_target_layers, "block_size": config.num_speculative_tokens}
    if source_format == "deepspec":
        return {"architectures": ["Qwen3DSparkModel"], **shape, **common, **features, **heads}
    attention_mode = "mha" if config.decoder.num_kv_heads == config.decoder.num_heads else "gqa"
    nested = {"projector_type": "dspark", "attention_mode": attention_mode, **features, **heads}
    return {"architectures": ["DSparkDraftModel"], **shape, **common, "dflash_config": nested}


def _speculators_json(config: DrafterConfig, shape: dict[str, Any], heads: dict[str, Any]) -> dict[str, Any]:
    method = {"proposal_type": "greedy", "speculative_tokens": config.num_speculative_tokens}
    return {
        "architectures": ["DSparkSpeculator"],
        "speculators_model_type": "dspark",
        "speculators_config": {
            "algorithm": "dspark",
            "default_proposal_method": "greedy",
            "proposal_methods": [method],
            "verifier": {"name_or_path": None, "architectures": [config.decoder.architecture]},
        },
        "block_size": config.block_width,
        "sample_from_anchor": config.sample_from_anchor,
        "aux_hidden_state_layer_ids": [i + 1 for i in config.target_layer_ids],
        "num_target_layers": config.num_target_layers,
        "mask_token_id": config.mask_token_id,
        **heads,
        "draft_vocab_size": config.draft_vocab_size,
        "tie_word_embeddings": False,
        "transformer_layer_config": shape,
    }
