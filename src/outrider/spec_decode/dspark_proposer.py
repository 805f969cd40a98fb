"""The DSpark proposer: one parallel pass of the drafter, then the sequential head walks the block.

Invariant: before ``propose``, the draft context of a request covers exactly the positions below its anchor; the
anchor's own target state is never in it (dspark paper, section on inference; the usual silent fault is an off-by-one
here, which only lowers acceptance).

A rank without requests runs the parallel pass like the others where the drafter crosses data-parallel ranks (it has
experts); a dense drafter's pass is left out there. Head and context projection are whole on every rank and cross none.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from outrider.batch.forward_batch import DrafterInputs
from outrider.batch.step_plan import PassKind, PassPlan, StepPlan
from outrider.config import DrafterConfig
from outrider.layers.attention.interface import LayerKV
from outrider.models.dspark import DSparkDrafter
from outrider.models.native_drafter import NativeDrafter
from outrider.runner.batch_builder import BatchBuilder, DraftRow
from outrider.runner.graph_runner import GraphKey, GraphRunner
from outrider.runner.model_runner import first_rows, moved_to
from outrider.sampling.backend import SamplingBackend
from outrider.sampling.proposal import Proposal
from outrider.spec_decode.proposer import DraftRequest


class DSparkProposer:
    def __init__(
        self,
        *,
        drafter: DSparkDrafter | NativeDrafter,
        config: DrafterConfig,
        num_speculative_tokens: int,
        kv_caches: Sequence[LayerKV],
        builder: BatchBuilder,
        graphs: GraphRunner,
        sampling: SamplingBackend,
    ) -> None:
        assert 1 <= num_speculative_tokens <= config.num_speculative_tokens
        self.num_speculative_tokens = num_speculative_tokens
        self.draft_width = config.block_width
        self.tap_layer_ids = config.target_layer_ids
        self._drafter = drafter
        self._config = config
        self._kv_caches = kv_caches
        self._builder = builder
        self._graphs = graphs
        self._sampling = sampling

    @torch.inference_mode()
    def capture(self, plan: PassPlan) -> None:
        batch = self._builder.draft(plan, [])
        self._graphs.capture(GraphKey.of(plan, batch.rank), batch.inputs, self._forward)

    @torch.inference_mode()
    def propose(self, plan: StepPlan, requests: Sequence[DraftRequest]) -> Proposal:
        pass_plan = plan.find(PassKind.DRAFT)
        if pass_plan is None or not (requests or self._drafter.crosses_dp_ranks):
            return Proposal.one_hot([()] * len(requests))
        batch = self._builder.draft(
            pass_plan,
            [
                DraftRow(anchor_id=r.anchor_id, anchor_position=r.row.anchor_position, block_ids=r.block_ids)
                for r in requests
            ],
        )
        hidden_RGD = self._graphs.run(GraphKey.of(pass_plan, batch.rank), batch.inputs, self._forward)
        if not requests:
            return Proposal.one_hot([])
        first = 0 if self._config.sample_from_anchor else 1  # slot 0 predicts nothing in the other convention
        used_RGD = first_rows(hidden_RGD, len(requests))
        if used_RGD.shape[1] != self.num_speculative_tokens:
            used_RGD = used_RGD[:, first : first + self.num_speculative_tokens]
        base_logits = self._drafter.compute_base_logits(used_RGD.flatten(0, 1))
        return self._sampling.propose(
            drafter=self._drafter,
            base_logits_RGV=base_logits.view(*used_RGD.shape[:2], -1),
            hidden_RGD=used_RGD,
            anchor_ids_R=moved_to(first_rows(batch.anchor_ids_R, len(requests)), hidden_RGD.device),
            rows=[r.row for r in requests],
            num_drafts_R=[r.num_drafts for r in requests],
            confidence=self._config.enable_confidence_head,
        )

    @torch.inference_mode()
    def write_context(self, *, taps_NF: Tensor, positions_N: Tensor, slots_N: Tensor) -> None:
        if positions_N.numel():
            self._drafter.write_context(taps_NF, positions_N, self._kv_caches, slots_N)

    def _forward(self, inputs: DrafterInputs) -> Tensor:
        return self._drafter.forward(
            inputs.anchor_ids_R, inputs.anchor_positions_R, self._kv_caches, inputs.metadata, inputs.experts
        )
