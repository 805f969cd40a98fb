"""The project's drafter, loaded from a directory and driven one request at a time through a paged pool."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from tests import fixtures
from tests.paged import KV_BLOCK_SIZE, make_pool
from tests.reference_drafter import ReferenceTarget
from torch import Tensor, nn

from outrider.batch.expert_metadata import ExpertMetadata
from outrider.config import ModelConfig
from outrider.layers.attention.interface import BlockMetadata
from outrider.models.drafter_checkpoint import LoadedDrafter, load_drafter
from outrider.models.model_config import from_hf


def load_for(path: Path, target: ReferenceTarget, target_config: ModelConfig | None = None) -> LoadedDrafter:
    return load_drafter(
        path,
        target_config=target_config or from_hf(fixtures.target_config()),
        embed_weight=nn.Parameter(target.embedding_VD),
        lm_head_weight=nn.Parameter(target.head_VD),
    )


class ModuleDrafter:
    """A ``GreedyDrafter`` over ``DSparkDrafter``: context written to a fresh pool in every round."""

    def __init__(self, loaded: LoadedDrafter) -> None:
        self.loaded = loaded

    @property
    def layer_ids(self) -> Sequence[int]:
        return self.loaded.config.target_layer_ids

    @torch.no_grad()
    def propose(self, features_PF: Tensor, anchor: int) -> tuple[list[int], Tensor]:
        model, config, context = self.loaded.model, self.loaded.config, features_PF.shape[0]
        blocks = -(-context // KV_BLOCK_SIZE)
        pool = make_pool(config.decoder, num_blocks=blocks)
        positions = torch.arange(context)
        model.write_context(features_PF, positions, pool, positions)
        metadata = BlockMetadata(
            context_lens_R=torch.tensor([context], dtype=torch.int32),
            block_tables_RB=torch.arange(blocks, dtype=torch.int32)[None],
            kv_block_size=KV_BLOCK_SIZE,
            block_width=config.block_width,
            max_context_len=context,
        )
        anchor_R = torch.tensor([anchor])
        experts = ExpertMetadata.single(config.block_width)
        hidden_GD = model(anchor_R, torch.tensor([context]), pool, metadata, experts)[0, model.slot_offset :]
        previous_R, state = anchor_R, model.markov_state(1)
        rows: list[Tensor] = []
        drafts: list[int] = []
        for hidden_D in hidden_GD:
            bias, state = model.markov_bias(previous_R, hidden_D[None], state)
            logits_V = model.compute_base_logits(hidden_D[None])[0] + bias[0]
            previous_R = model.draft_to_target_V[logits_V.argmax()][None]
            drafts.append(int(previous_R))
            rows.append(logits_V)
        return drafts, torch.stack(rows)
