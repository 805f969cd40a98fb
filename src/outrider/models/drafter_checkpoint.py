"""Loading a DSpark drafter for a target: read, check against the target, account for every tensor, fill the module.

Everything that can be refused from ``config.json`` and the file headers is refused before a weight is read. The
drafter's rotary settings are its own and may differ from the target's; its width, vocabulary, mask id and tapped
layers must fit the target.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from outrider.config import DrafterConfig, DTypeName, ModelConfig
from outrider.errors import CheckpointError, ConfigError
from outrider.layers.attention.registry import get_attention_backend
from outrider.layers.checkpoint import checkpoint_views
from outrider.models.drafter_card import DrafterCard, read_card
from outrider.models.drafter_checkpoint_config import read_drafter_config
from outrider.models.drafter_checkpoint_source import resolve_drafter
from outrider.models.drafter_checkpoint_tensors import (
    DRAFT_TO_TARGET,
    EMBEDDING,
    HEAD,
    TARGET_TO_DRAFT,
    StoredTensor,
    TensorPlan,
    plan_tensors,
    with_target_vocab,
)
from outrider.models.dspark import DSparkDrafter
from outrider.models.weights import TORCH_DTYPES, check_size, part_index
from outrider.models.weights_safetensors import open_safetensors, stored_bytes, tensor_headers
from outrider.parallel.state import SINGLE_RANK, ParallelState

__all__ = [
    "LoadedDrafter",
    "check_against_target",
    "check_num_speculative_tokens",
    "load_drafter",
    "plan_directory",
    "resolve_drafter",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedDrafter:
    model: DSparkDrafter
    config: DrafterConfig  # over the target's vocabulary
    card: DrafterCard
    path: Path


def check_against_target(config: DrafterConfig, target: ModelConfig, *, source: str = "drafter") -> None:
    """Refuse a drafter made for another target, naming the field and both values."""
    decoder = config.decoder
    if decoder.hidden_size != target.hidden_size:
        raise CheckpointError(
            f"{source}: hidden_size={decoder.hidden_size} differs from the target's hidden_size={target.hidden_size}"
        )
    beyond = [i for i in config.target_layer_ids if i >= target.num_layers]
    if beyond:
        raise CheckpointError(
            f"{source}: target_layer_ids={list(config.target_layer_ids)} taps layer {beyond[0]}, but the target has "
            f"num_layers={target.num_layers}, so that ids end at {target.num_layers - 1}"
        )
    if config.num_target_layers not in (0, target.num_layers):
        raise CheckpointError(
            f"{source}: num_target_layers={config.num_target_layers} differs from the target's "
            f"num_layers={target.num_layers}"
        )
    if decoder.vocab_size < target.vocab_size:
        raise CheckpointError(
            f"{source}: vocab_size={decoder.vocab_size} is below the target's vocab_size={target.vocab_size}; "
            "it may only be padded above"
        )
    if config.mask_token_id >= target.vocab_size:
        raise CheckpointError(
            f"{source}: mask_token_id={config.mask_token_id} must be below the target's vocab_size={target.vocab_size}"
        )


def check_num_speculative_tokens(requested: int | None, config: DrafterConfig) -> int:
    """The number to draft; by default all the drafter was trained for. Fewer are a prefix of its block."""
    if requested is None:
        return config.num_speculative_tokens
    if not 1 <= requested <= config.num_speculative_tokens:
        raise ConfigError(
            f"num_speculative_tokens={requested} must lie in 1..{config.num_speculative_tokens}, the block the drafter "
            "was trained for"
        )
    return requested


def plan_directory(directory: Path, own: DrafterConfig, *, target_vocab_size: int) -> TensorPlan:
    """What becomes of every tensor in ``directory``, whose config is ``own``."""
    check_size(own.decoder, stored_bytes=stored_bytes(directory), source=str(directory), owns_vocabulary=False)
    stored = (
        StoredTensor(name=name, shape=tuple(entry["shape"]), dtype=entry["dtype"])
        for name, entry in tensor_headers(directory).items()
    )
    return plan_tensors(stored, own, target_vocab_size=target_vocab_size)


def load_drafter(
    path: Path | str,
    *,
    target_config: ModelConfig,
    embed_weight: nn.Parameter,
    lm_head_weight: nn.Parameter,
    parallel: ParallelState = SINGLE_RANK,
    dtype: DTypeName = "float32",
    device: str = "cpu",
    attention_backend: str = "auto",
) -> LoadedDrafter:
    """Load the drafter in directory ``path``; it shares the target's ``embed_weight`` and ``lm_head_weight`` [V, D]."""
    directory = Path(path)
    source = str(directory)
    own = read_drafter_config(directory)
    check_against_target(own, target_config, source=source)
    plan = plan_directory(directory, own, target_vocab_size=target_config.vocab_size)
    plan.raise_problems(source)
    config = with_target_vocab(own, target_config.vocab_size)
    card = read_card(directory)
    tables = _read(directory, (HEAD, DRAFT_TO_TARGET, TARGET_TO_DRAFT))
    draft_to_target_V = _draft_to_target(tables, config, source)
    if HEAD in plan.used:
        head_VD = nn.Parameter(tables[HEAD].to(lm_head_weight.device, TORCH_DTYPES[dtype]), requires_grad=False)
    elif DRAFT_TO_TARGET in plan.used:
        rows_VD = lm_head_weight.detach()[draft_to_target_V.to(lm_head_weight.device)]
        head_VD = nn.Parameter(rows_VD, requires_grad=False)
    else:
        head_VD = lm_head_weight
    model = DSparkDrafter(
        config,
        embedding_VD=embed_weight,
        lm_head_VD=head_VD,
        draft_to_target_V=draft_to_target_V,
        backend=get_attention_backend(attention_backend, device=device),
        parallel=parallel,
        dtype=TORCH_DTYPES[dtype],
        device=device,
    )
    _fill(model, directory, plan)
    model.requires_grad_(False)
    model.eval()
    return LoadedDrafter(model=model, config=config, card=card, path=directory)


def _read(directory: Path, names: tuple[str, ...]) -> dict[str, Tensor]:
    """Those of ``names`` that the checkpoint has, read whole."""
    stored = ((name.removeprefix("model."), tensor) for name, tensor in open_safetensors(directory))
    return {name: tensor[()] for name, tensor in stored if name in names}


def _draft_to_target(tensors: dict[str, Tensor], config: DrafterConfig, source: str) -> Tensor:
    """int64 [Vd]: the target id of each draft id, from the offsets in the file where there are any."""
    draft_to_target_V = torch.arange(config.draft_vocab_size)
    if DRAFT_TO_TARGET not in tensors:
        return draft_to_target_V
    draft_to_target_V = draft_to_target_V + tensors[DRAFT_TO_TARGET].long()
    vocab_size = config.decoder.vocab_size
    outside = ((draft_to_target_V < 0) | (draft_to_target_V >= vocab_size)).nonzero().flatten().tolist()
    if outside:
        raise CheckpointError(
            f"{source}: d2t maps draft id {outside[0]} to target id {int(draft_to_target_V[outside[0]])}, outside "
            f"0..{vocab_size - 1}"
        )
    distinct_V = torch.tensor(sorted(set(draft_to_target_V.tolist())))
    if len(distinct_V) != len(draft_to_target_V):
        raise CheckpointError(
            f"{source}: d2t maps {len(draft_to_target_V)} draft ids to only {len(distinct_V)} target ids"
        )
    flags = tensors.get(TARGET_TO_DRAFT)
    if flags is not None and not torch.equal(flags.nonzero().flatten(), distinct_V):
        raise CheckpointError(f"{source}: t2d and d2t disagree about which target ids can be drafted")
    return draft_to_target_V


def _fill(model: DSparkDrafter, directory: Path, plan: TensorPlan) -> None:
    """Every tensor that ``plan`` uses in the layers; experts that other ranks hold are not read."""
    views = checkpoint_views(model)
    own = {name: view for name, view in views.items() if name not in (EMBEDDING, HEAD)}
    assert own.keys() == plan.used.keys() - {HEAD, DRAFT_TO_TARGET}, sorted(own.keys() ^ plan.used.keys())
    with torch.no_grad():
        for stored_name, tensor in open_safetensors(directory):
            view = own.get(stored_name.removeprefix("model."))
            if view is not None and view.tensor.numel():
                # By the view's own shape: rows beyond are padding of the vocabulary.
                view.tensor.copy_(tensor[part_index(view.shape, view.part)])
