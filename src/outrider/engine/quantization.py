"""What ``--quantization`` means: which weights run in compiled passes, and what is refused by name.

``none`` runs the torch modules. ``int8`` and ``int4`` pack the target for the compiled kernels (the LM head is int8 in
both) and a dense drafter in int8; a drafter with expert layers stays as it is. ``auto``, the default, chooses them
where this machine has kernels and they cover the model and its options: int4 for a GGUF file whose layers are 4-bit
already, which is nearer to that file than int8 and faster; int8 for everything else. A ``--dtype`` alone asks for
weights of that type, so it makes ``auto`` mean ``none``; with a quantization it is the type of what stays plain, keys
and values included. Where ``auto`` is ``none`` and nobody asked for that, the log says why, in one line.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch

from outrider.config import (
    DeviceName,
    DrafterConfig,
    DTypeName,
    EngineArgs,
    EngineConfig,
    ModelConfig,
    QuantizationName,
)
from outrider.errors import ConfigError
from outrider.logger import get_logger
from outrider.models.decoder import Decoder
from outrider.models.describe import ModelDescription
from outrider.models.drafter_card import DrafterCard, read_card
from outrider.models.drafter_checkpoint import LoadedDrafter, load_drafter
from outrider.models.drafter_checkpoint_tensors import with_target_vocab
from outrider.models.dspark import DSparkDrafter
from outrider.models.native_decoder import NativeDecoder, pack_decoder
from outrider.models.native_drafter import NativeDrafter, pack_drafter
from outrider.models.native_stack import require_native
from outrider.models.packed_cache import cached_weights
from outrider.models.source import LoadedModel, load_model
from outrider.models.tokenizer import Tokenizer
from outrider.models.weights import TORCH_DTYPES
from outrider.ops.native_kernels import Kernels, load_kernels
from outrider.parallel.state import ParallelState

logger = get_logger(__name__)


def resolve_quantization(args: EngineArgs, model: ModelDescription, *, device: DeviceName) -> QuantizationName:
    """Raises ConfigError for a quantization that cannot run here; ``auto`` is then ``none``."""
    if args.quantization == "none" or (args.quantization == "auto" and args.dtype != "auto"):
        return "none"
    wanted: QuantizationName = model.quantization if args.quantization == "auto" else args.quantization
    try:
        _require_cover(args, model.config, wanted, device=device)
    except ConfigError as error:
        if args.quantization == "auto":
            _say_once(f"the model runs in torch, unquantised: {error}")
            return "none"
        raise
    if load_kernels() is not None:
        return wanted
    if args.quantization == "auto":  # the build has said why there are none
        return "none"
    raise ConfigError(f"quantization={wanted!r} needs a C++ compiler (g++ or clang++) that builds its kernels")


def _require_cover(args: EngineArgs, model: ModelConfig, wanted: QuantizationName, *, device: DeviceName) -> None:
    """Raises ConfigError where compiled passes do not run this model with these options."""
    if device != "cpu":
        raise ConfigError(f"quantization={wanted!r} runs compiled CPU passes; it needs device='cpu', not {device!r}")
    if args.tensor_parallel_size > 1:
        raise ConfigError(
            f"quantization={wanted!r} shares no layer between ranks; it needs tensor_parallel_size=1, not "
            f"{args.tensor_parallel_size}"
        )
    if args.attention_backend != "auto":
        raise ConfigError(
            f"quantization={wanted!r} has an attention of its own; it needs attention_backend='auto', not "
            f"{args.attention_backend!r}"
        )
    require_native(model, quantization=wanted, what="model")


@cache
def _say_once(line: str) -> None:
    """Configurations are resolved by several hands: the front, each rank, each engine that is compared."""
    logger.info(line)


def default_kv_dtype(config: ModelConfig, dtype: DTypeName, quantization: QuantizationName) -> DTypeName:
    """Of the keys and values of a model in ``dtype``: bfloat16 where compiled passes read them.

    Streams over contexts of their own read more of these than of weights, and what rounding them loses is little
    beside what quantised weights lose already (docs/benchmarks.md).
    """
    covered = quantization != "none" and _obstacle(config, quantization, what="model") is None
    return "bfloat16" if covered else dtype


def required_kernels() -> Kernels:
    """Those that ``resolve_quantization`` found."""
    kernels = load_kernels()
    assert kernels is not None, "a quantization was resolved without kernels"
    return kernels


@dataclass(frozen=True, slots=True)
class Target:
    """The target as it runs, and its tokenizer."""

    model: Decoder | NativeDecoder
    tokenizer: Tokenizer


@dataclass(frozen=True, slots=True)
class Drafter:
    """A drafter as it runs."""

    model: DSparkDrafter | NativeDrafter
    config: DrafterConfig  # over the target's vocabulary
    card: DrafterCard


def ready_target(
    description: ModelDescription,
    config: EngineConfig,
    *,
    loaded: LoadedModel | None,
    parallel: ParallelState,
    device: torch.device,
) -> Target:
    """The target of ``config``: made of ``loaded`` if it is given, of packed weights in the cache, or of its files."""
    if loaded is None and config.quantization == "none":
        loaded = _load(config, parallel, device)
    if loaded is not None:
        return Target(quantised_target(loaded.model, config.quantization), loaded.tokenizer)
    kernels = required_kernels()
    tokenizer = description.load_tokenizer()
    weights = cached_weights(
        description.path,
        variant=f"{config.quantization}-{config.dtype}",
        make=lambda: pack_decoder(kernels, _load(config, parallel, device).model, quantization=config.quantization),
    )
    _leave_cores_to_kernels()
    return Target(NativeDecoder(kernels, description.config, weights), tokenizer)


def ready_drafter(
    own: DrafterConfig,
    config: EngineConfig,
    *,
    target: Decoder | NativeDecoder,
    target_path: Path | None,
    parallel: ParallelState,
    device: torch.device,
) -> Drafter:
    """The drafter at ``config.drafter_path``, whose configuration is ``own``.

    ``target_path``: where the target's weights are, if packed weights may be kept; None keeps none.
    """
    path, embedding = Path(config.drafter_path), target.embed_tokens.weight

    def load() -> LoadedDrafter:
        head = target.lm_head_weight if isinstance(target, NativeDecoder) else target.lm_head.whole_weight()
        return load_drafter(
            path,
            target_config=target.config,
            embed_weight=embedding,
            lm_head_weight=head,
            parallel=parallel,
            dtype=config.dtype,
            device=str(device),
            attention_backend=config.attention_backend,
        )

    kernels = _kernels_for(own, config.quantization)
    if kernels is None or target_path is None:
        loaded = load()
        model = loaded.model if kernels is None else NativeDrafter.of(kernels, loaded.model)
        return Drafter(model, loaded.config, loaded.card)
    weights = cached_weights(
        path, target_path, variant=f"int8-{config.dtype}", make=lambda: pack_drafter(kernels, load().model)
    )
    own = with_target_vocab(own, target.config.vocab_size)
    native = NativeDrafter(kernels, own, weights, embedding_VD=embedding, dtype=TORCH_DTYPES[config.dtype])
    return Drafter(native, own, read_card(path))


def load_shared_target(config: EngineConfig) -> LoadedModel | None:
    """The target of several engines in this process, loaded once.

    None with a quantization: each maps the packed weights in the cache, whose pages are in memory once all the same.
    """
    if config.quantization != "none":
        return None
    return load_model(
        config.model, dtype=config.dtype, device=config.device, attention_backend=config.attention_backend
    )


def quantised_target(model: Decoder, quantization: QuantizationName) -> Decoder | NativeDecoder:
    """``model`` itself without a quantization; with one, torch has a single thread from here on in this process."""
    if quantization == "none":
        return model
    kernels = required_kernels()  # first: they take as many threads as torch has
    _leave_cores_to_kernels()
    return NativeDecoder.of(kernels, model, quantization=quantization)


def _load(config: EngineConfig, parallel: ParallelState, device: torch.device) -> LoadedModel:
    return load_model(
        config.model,
        parallel=parallel,
        dtype=config.dtype,
        device=str(device),
        attention_backend=config.attention_backend,
    )


def _leave_cores_to_kernels() -> None:
    """The kernels have threads of their own. Those of torch's OpenMP spin for milliseconds after each parallel
    operation, on the cores that the next pass needs, and a reduction over logits waits for them in turn."""
    torch.set_num_threads(1)


def _kernels_for(drafter: DrafterConfig, quantization: QuantizationName) -> Kernels | None:
    """None without a quantization, and where no kernel covers the drafter (expert layers)."""
    if quantization == "none":
        return None
    if error := _obstacle(drafter.decoder, quantization, what="drafter"):
        logger.info("the drafter runs in torch: %s", error)
        return None
    return required_kernels()


def _obstacle(config: ModelConfig, quantization: QuantizationName, *, what: str) -> ConfigError | None:
    """Why no kernel covers a model; None where kernels do."""
    try:
        require_native(config, quantization=quantization, what=what)
    except ConfigError as error:
        return error
    return None
