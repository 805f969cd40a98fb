"""What the runner asks of a target model and of a drafter. Both are nn.Modules; these protocols are their contract.

Shape legend: N rows, K rows that need logits, D hidden size, F = len(target_layer_ids) * D tapped width,
V target vocabulary, Vd draft vocabulary, G = block width (gamma).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from outrider.batch.expert_metadata import ExpertMetadata
from outrider.config import ModelConfig
from outrider.layers.attention.interface import BlockMetadata, CausalMetadata, LayerKV


@dataclass(frozen=True, slots=True)
class DecoderOutput:
    hidden_ND: Tensor  # after the final norm
    taps_NF: Tensor  # outputs of the tapped decoder layers (raw residual stream), concatenated; F = 0 without taps


class TargetModel(Protocol):
    @property
    def config(self) -> ModelConfig: ...

    @property
    def crosses_dp_ranks(self) -> bool:
        """Whether a forward has collectives with other data-parallel ranks: then ranks without rows run it too."""
        ...

    def forward(
        self,
        token_ids_N: Tensor,
        positions_N: Tensor,
        kv_caches: Sequence[LayerKV],
        metadata: CausalMetadata,
        tap_layer_ids: tuple[int, ...],
        experts: ExpertMetadata,
    ) -> DecoderOutput:
        """token_ids int64 [N], positions int64 [N]; ids of taps as in HF ``hidden_states[i + 1]``; -1 = embedding."""
        ...

    def compute_logits(self, hidden_KD: Tensor) -> Tensor:
        """fp32 [K, V]."""
        ...

    def finite_rows(self, logits_KV: Tensor) -> tuple[bool, ...]:
        """Of each row of logits, whether all of it is finite."""
        ...


class DrafterModel(Protocol):
    """The drafter's three calls of a round, plus the sequential head (see models/dspark.py)."""

    @property
    def crosses_dp_ranks(self) -> bool:
        """As a target's, of ``forward``; ``write_context`` never crosses, it runs no experts."""
        ...

    def write_context(
        self,
        taps_NF: Tensor,
        positions_N: Tensor,
        kv_caches: Sequence[LayerKV],
        slot_mapping_N: Tensor,
    ) -> None:
        """Project tapped features of committed positions and store every draft layer's context K/V at their slots."""
        ...

    def forward(
        self,
        anchor_ids_R: Tensor,
        anchor_positions_R: Tensor,
        kv_caches: Sequence[LayerKV],
        metadata: BlockMetadata,
        experts: ExpertMetadata,
    ) -> Tensor:
        """Hidden of the block [anchor, mask * (G-1)] at positions p..p+G-1, after the final norm: [R, G, D]."""
        ...

    def compute_base_logits(self, hidden_KD: Tensor) -> Tensor:
        """fp32 [K, Vd], without the Markov bias."""
        ...
