"""What ``--quantization`` means: which weights run in compiled passes, and what is refused by name.

``none`` runs the torch modules. ``int8`` and ``int4`` pack the target for the compiled kernels (the LM head is int8 in
both) and a dense drafter in int8; a drafter with expert layers stays as it is. ``auto`` chooses them where this machine
can build them and the model is covered: int4 for a GGUF file whose layers are 4-bit already, which loses nothing, int8
for everything else.
"""

from __future__ import annotations

import torch

from outrider.config import DeviceName, DTypeName, EngineArgs, ModelConfig, QuantizationName
from outrider.errors import ConfigError
from outrider.logger import get_logger
from outrider.models.decoder import Decoder
from outrider.models.describe import ModelDescription
from outrider.models.dspark import DSparkDrafter
from outrider.models.native_decoder import NativeDecoder
from outrider.models.native_drafter import NativeDrafter
from outrider.models.native_stack import require_native
from outrider.ops.native_kernels import Kernels, load_kernels

logger = get_logger(__name__)


def resolve_quantization(args: EngineArgs, model: ModelDescription, *, device: DeviceName) -> QuantizationName:
    """Raises ConfigError for a quantization that cannot run here; ``auto`` is then ``none``."""
    if args.quantization == "none":
        return "none"
    wanted: QuantizationName = model.quantization if args.quantization == "auto" else args.quantization
    try:
        if device != "cpu":
            raise ConfigError(
                f"quantization={wanted!r} runs compiled CPU passes; it needs device='cpu', not {device!r}"
            )
        if args.tensor_parallel_size > 1:
            raise ConfigError(
                f"quantization={wanted!r} shares no layer between ranks; it needs tensor_parallel_size=1, not "
                f"{args.tensor_parallel_size}"
            )
        require_native(model.config, quantization=wanted, what="model")
        if load_kernels() is None:
            raise ConfigError(f"quantization={wanted!r} needs a C++ compiler (g++ or clang++) that builds its kernels")
    except ConfigError:
        if args.quantization == "auto":
            return "none"
        raise
    return wanted


def default_kv_dtype(config: ModelConfig, dtype: DTypeName, quantization: QuantizationName) -> DTypeName:
    """Of the keys and values of a model in ``dtype``: bfloat16 where compiled passes read them.

    Streams over contexts of their own read more of these than of weights, and what rounding them loses is little
    beside what quantised weights lose already (docs/benchmarks.md).
    """
    if quantization == "none":
        return dtype
    try:
        require_native(config, quantization=quantization, what="model")
    except ConfigError:
        return dtype
    return "bfloat16"


def required_kernels() -> Kernels:
    """Those that ``resolve_quantization`` found."""
    kernels = load_kernels()
    assert kernels is not None, "a quantization was resolved without kernels"
    return kernels


def quantised_target(model: Decoder, quantization: QuantizationName) -> Decoder | NativeDecoder:
    """``model`` itself without a quantization; with one, torch has a single thread from here on in this process."""
    if quantization == "none":
        return model
    kernels = required_kernels()
    # The kernels have threads of their own. Those of torch's OpenMP spin for milliseconds after each parallel
    # operation, on the cores that the next pass needs, and a reduction over logits waits for them in turn.
    torch.set_num_threads(1)
    return NativeDecoder(kernels, model, quantization=quantization)


def quantised_drafter(model: DSparkDrafter, quantization: QuantizationName) -> DSparkDrafter | NativeDrafter:
    """``model`` itself without a quantization, and where no kernel covers it (expert layers)."""
    if quantization == "none":
        return model
    try:
        require_native(model.config.decoder, quantization=quantization, what="drafter")
    except ConfigError as error:
        logger.info("the drafter runs in torch: %s", error)
        return model
    return NativeDrafter(required_kernels(), model)
