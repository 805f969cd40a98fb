"""Runs the target over a prefill or verify batch: hidden states, logits of the rows that need them, tapped features.

A rank without rows runs the forward like the others where it crosses data-parallel ranks, so that all of them issue the
same collectives; a dense target's forward crosses none and is left out there.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import assert_never

import torch
from torch import Tensor

from outrider.batch.forward_batch import PrefillBatch, TargetInputs, VerifyBatch
from outrider.batch.step_plan import PassPlan
from outrider.layers.attention.interface import LayerKV
from outrider.models.interface import DecoderOutput, TargetModel
from outrider.runner.batch_builder import BatchBuilder
from outrider.runner.graph_runner import GraphKey, GraphRunner


@dataclass(frozen=True, slots=True, kw_only=True)
class TargetOutput:
    """What one pass of the target gives. N rows that really ran, K rows with logits, F tapped width."""

    logits_KV: Tensor  # fp32; rows that are not finite are zeroed
    finite_K: tuple[bool, ...]  # False: the model gave NaN or infinity, so the row's request cannot go on
    taps_NF: Tensor
    positions_N: Tensor  # int64
    slots_N: Tensor  # int64


class ModelRunner:
    """Owns the target and its KV pool; knows nothing of scheduling or sampling."""

    def __init__(
        self,
        *,
        target: TargetModel,
        kv_caches: Sequence[LayerKV],
        tap_layer_ids: tuple[int, ...],
        graphs: GraphRunner,
    ) -> None:
        self._target = target
        self._kv_caches = kv_caches
        self._tap_layer_ids = tap_layer_ids
        self._graphs = graphs

    @torch.inference_mode()
    def capture(self, plan: PassPlan, builder: BatchBuilder) -> None:
        """Capture the tier of ``plan``, which has no real rows on any rank."""
        batch = builder.verify(plan, [])
        self._graphs.capture(GraphKey.of(plan, batch.rank), batch.inputs, self._forward)

    @torch.inference_mode()
    def run(self, batch: PrefillBatch | VerifyBatch) -> TargetOutput:
        real = batch.tokens.value
        if not (real or self._target.crosses_dp_ranks):
            return self._no_rows(batch)
        output = self._graphs.run(GraphKey.of(batch.plan, batch.rank), batch.inputs, self._forward)
        device = output.hidden_ND.device
        match batch:
            case PrefillBatch():
                hidden_KD = output.hidden_ND[moved_to(batch.logit_rows_K, device)]
            case VerifyBatch():
                hidden_KD = first_rows(output.hidden_ND, real)
            case _:
                assert_never(batch)
        logits_KV = self._target.compute_logits(hidden_KD)
        finite = self._target.finite_rows(logits_KV)
        if not all(finite):
            finite_K = torch.tensor(finite, device=device)
            logits_KV = torch.where(finite_K[:, None], logits_KV, 0.0)
        return TargetOutput(
            logits_KV=logits_KV,
            finite_K=finite,
            taps_NF=first_rows(output.taps_NF, real),
            positions_N=moved_to(first_rows(batch.positions_N, real), device),
            slots_N=moved_to(first_rows(batch.metadata.slot_mapping_N, real), device),
        )

    def _forward(self, inputs: TargetInputs) -> DecoderOutput:
        return self._target.forward(
            inputs.token_ids_N,
            inputs.positions_N,
            self._kv_caches,
            inputs.metadata,
            self._tap_layer_ids,
            inputs.experts,
        )

    def _no_rows(self, batch: PrefillBatch | VerifyBatch) -> TargetOutput:
        """What a pass without rows gives, without running it."""
        config, device = self._target.config, batch.token_ids_N.device
        return TargetOutput(
            logits_KV=torch.empty(0, config.vocab_size, device=device),
            finite_K=(),
            taps_NF=torch.empty(0, config.hidden_size * len(self._tap_layer_ids), device=device),
            positions_N=batch.positions_N[:0],
            slots_N=batch.metadata.slot_mapping_N[:0],
        )


def first_rows(x_NX: Tensor, rows: int) -> Tensor:
    """A slice takes time, even one of everything."""
    return x_NX if x_NX.shape[0] == rows else x_NX[:rows]


def moved_to(x: Tensor, device: torch.device) -> Tensor:
    """``x`` on its way there. Even a move to where it is takes time."""
    return x if x.is_cpu and device.type == "cpu" else x.to(device, non_blocking=True)
