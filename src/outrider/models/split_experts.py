"""A dense Llama rewritten as a Mixtral checkpoint that computes the same function through the whole expert path.

Each MLP is cut along its intermediate size into E slices, which become E experts. All are chosen for every row
(``num_experts_per_tok`` = E), and a router of zeros gives each the weight 1/E, so the factor E is folded into the down
projection: sum over e of 1/E * (E * down_e)(silu(gate_e x) * (up_e x)) is the dense MLP. E is a power of two, for which
1/E and E are exact in every floating-point type; results then differ from the dense model's by the order of addition
only. The worst fault, a slice that is left out or taken twice, changes the function and is what the tests compare.

The model is loaded whole, so that every tensor of the source is accounted for; the new directory appears complete or
not at all.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from outrider.config import DTypeName, ModelConfig, MoEConfig
from outrider.errors import CheckpointError, ConfigError
from outrider.layers.checkpoint import checkpoint_views
from outrider.models.describe import describe_model
from outrider.models.model_config_json import model_config_to_json
from outrider.models.source import LoadedModel, load_model, read_json
from outrider.models.weights_safetensors import INDEX_FILE, SINGLE_FILE

MAX_SHARD_BYTES = 4 * 2**30
_MATRICES = {"mlp.gate_proj.weight": "w1", "mlp.up_proj.weight": "w3", "mlp.down_proj.weight": "w2"}


@dataclass(frozen=True, slots=True, kw_only=True)
class SplitResult:
    path: Path
    config: ModelConfig
    dtype: DTypeName
    num_tensors: int
    stored_bytes: int
    files: tuple[str, ...]  # with weights


def split_experts(
    model: str,
    *,
    num_experts: int,
    output: Path,
    dtype: DTypeName | None = None,
    max_shard_bytes: int = MAX_SHARD_BYTES,
) -> SplitResult:
    """Write ``model`` with its MLPs split into ``num_experts`` experts as the HF directory ``output``.

    ``dtype`` is the checkpoint's own where it is None. Raises ConfigError for what cannot be split exactly and for an
    ``output`` that exists and is not empty.
    """
    description = describe_model(model)
    config = split_config(description.config, num_experts)
    if output.exists() and (not output.is_dir() or any(output.iterdir())):
        raise ConfigError(f"output={str(output)!r} exists and is not an empty directory")
    stored_as = dtype or description.dtype
    loaded = load_model(model, dtype=stored_as)
    place = output.absolute()
    scratch = place.with_name(f".{place.name}.{os.getpid()}")
    try:
        scratch.mkdir(parents=True)
        files, num_tensors, num_bytes = _write_weights(loaded, config, scratch, max_shard_bytes)
        _write_json(scratch / "config.json", _config_json(config, stored_as))
        _write_json(scratch / "generation_config.json", _generation_config(loaded, config))
        loaded.tokenizer.save(scratch)
        os.replace(scratch, place)
    except OSError as error:
        raise CheckpointError(f"output={str(output)!r} cannot be written ({error})") from error
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    return SplitResult(
        path=output, config=config, dtype=stored_as, num_tensors=num_tensors, stored_bytes=num_bytes, files=files
    )


def split_config(dense: ModelConfig, num_experts: int) -> ModelConfig:
    """The configuration after the split. Raises ConfigError for a model or a number that cannot be split exactly."""
    if dense.architecture != "LlamaForCausalLM":
        raise ConfigError(f"split-experts takes a dense Llama, and this is a {dense.architecture}")
    for name in ("attention_bias", "attention_output_bias", "mlp_bias"):
        if getattr(dense, name):
            raise ConfigError(f"split-experts: the model has {name}=True, and Mixtral has no biases")
    if num_experts < 1 or num_experts & (num_experts - 1):
        raise ConfigError(
            f"num_experts={num_experts} must be a power of two: the factor on the down projection is exact only then"
        )
    if dense.intermediate_size % num_experts:
        raise ConfigError(f"num_experts={num_experts} does not divide intermediate_size={dense.intermediate_size}")
    share = dense.intermediate_size // num_experts
    return replace(
        dense,
        architecture="MixtralForCausalLM",
        intermediate_size=share,
        moe=MoEConfig(
            num_experts=num_experts,
            num_experts_per_tok=num_experts,
            moe_intermediate_size=share,
            norm_topk_prob=True,
            sparse_layers=(True,) * dense.num_layers,
        ),
    )


def _tensors(loaded: LoadedModel, num_experts: int) -> Iterator[tuple[str, Tensor]]:
    """The new checkpoint's tensors under Mixtral's names, each with storage of its own."""
    for name, view in checkpoint_views(loaded.model).items():
        prefix, matrix = next(((name.removesuffix(m), m) for m in _MATRICES if name.endswith(m)), (name, ""))
        if not matrix:
            yield name if name == "lm_head.weight" else f"model.{name}", view.tensor.clone()
            continue
        is_down = matrix == "mlp.down_proj.weight"
        for expert, part in enumerate(view.tensor.chunk(num_experts, dim=1 if is_down else 0)):
            # Scaling by a power of two is exact; contiguous() also copies, so that no file holds a shared view.
            scaled = part * num_experts if is_down else part.clone()
            yield f"model.{prefix}block_sparse_moe.experts.{expert}.{_MATRICES[matrix]}.weight", scaled.contiguous()
        if is_down:
            router = view.tensor.new_zeros(num_experts, loaded.config.hidden_size)
            yield f"model.{prefix}block_sparse_moe.gate.weight", router


def _write_weights(
    loaded: LoadedModel, config: ModelConfig, directory: Path, max_shard_bytes: int
) -> tuple[tuple[str, ...], int, int]:
    """Files written, tensors and bytes: one file, or shards with an index where they exceed ``max_shard_bytes``."""
    assert config.moe is not None
    shards: list[list[str]] = []  # names of the tensors in each
    shard: dict[str, Tensor] = {}
    total = 0

    def close_shard() -> None:
        shards.append(list(shard))
        save_file(shard, directory / _part_name(len(shards)), metadata={"format": "pt"})
        shard.clear()

    held = 0
    for name, tensor in _tensors(loaded, config.moe.num_experts):
        if not bool(torch.isfinite(tensor).all()):
            raise CheckpointError(f"tensor {name!r} is not finite in {tensor.dtype} after the split")
        if shard and held + tensor.nbytes > max_shard_bytes:
            close_shard()
            held = 0
        shard[name] = tensor
        held += tensor.nbytes
        total += tensor.nbytes
    close_shard()
    num_tensors = sum(map(len, shards))
    if len(shards) == 1:
        (directory / _part_name(1)).rename(directory / SINGLE_FILE)
        return (SINGLE_FILE,), num_tensors, total
    files = tuple(f"model-{i:05}-of-{len(shards):05}.safetensors" for i in range(1, len(shards) + 1))
    for i, file in enumerate(files, start=1):
        (directory / _part_name(i)).rename(directory / file)
    weight_map = {name: file for names, file in zip(shards, files, strict=True) for name in names}
    _write_json(directory / INDEX_FILE, {"metadata": {"total_size": total}, "weight_map": weight_map})
    return files, num_tensors, total


def _part_name(number: int) -> str:
    return f"part-{number:05}.safetensors"  # until the number of parts is known


def _config_json(config: ModelConfig, dtype: DTypeName) -> dict[str, Any]:
    return {"architectures": ["MixtralForCausalLM"], **model_config_to_json(config), "dtype": dtype}


def _generation_config(loaded: LoadedModel, config: ModelConfig) -> dict[str, Any]:
    """The source's own, where it has one; with the ids that end a text, which the loader looks for there first."""
    source = loaded.path / "generation_config.json"
    own = read_json(source) if loaded.path.is_dir() and source.is_file() else {}
    ids = {"eos_token_id": list(config.eos_token_ids)} if config.eos_token_ids else {}
    bos = {"bos_token_id": config.bos_token_id} if config.bos_token_id >= 0 else {}
    return {**bos, **own, **ids}


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
