"""A sparse mixture of SwiGLU experts: a softmax router picks k experts a row, their weighted outputs are added.

The router's matmul runs in the weights' dtype, softmax and top-k in fp32, and the weights stay fp32 until the sum (as
published for Mixtral; Qwen3's reference code rounds them to the model's dtype, a last-bit difference below fp32). With
``norm_topk_prob`` the chosen weights are divided by their sum.

The experts of a rank are stacked in two tensors, and there are two ways to compute with them. Sorted: rows are sorted
by expert and each expert with rows does one matmul pair on them; the counts are read on the host. Static: every expert
held does its pair on all rows and the router's choices are picked from the results, so that no shape depends on the
routing. That multiplies what no row asked for, but a small pass reads each expert's weights once either way; it is what
a captured pass on a GPU runs. Padding rows are masked in the routing (-1) where the pass asks for it, and then reach no
expert.

``expert_load`` counts rows that this rank's experts computed, by global expert id, since the module was made: over all
ranks, real tokens * k a pass with expert parallelism and masked padding. Without expert parallelism each rank computes
a slice of every expert and counts all of them.

Shape legend: N rows, M rows computed on, D hidden size, I intermediate size held here, E experts held here, k experts
per token, P pairs of row and expert.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from outrider.batch.expert_metadata import ExpertMetadata
from outrider.config import MoEConfig
from outrider.layers.checkpoint import CheckpointView, join_names
from outrider.layers.linear import Linear
from outrider.layers.token_dispatcher import ExpertPlacement, Routing, make_dispatchers
from outrider.parallel.state import ParallelState


class StackedExperts(nn.Module):
    """The experts this rank holds, or its slice of all. Weights are left uninitialised, for a loader to fill."""

    def __init__(
        self,
        hidden_size: int,
        intermediate_size: int,
        placement: ExpertPlacement,
        *,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ) -> None:
        super().__init__()
        self.placement = placement
        self.intermediate_size = intermediate_size  # of a whole expert
        held, inner = placement.num_local_experts, placement.intermediate_size
        self.gate_up_proj = nn.Parameter(torch.empty(held, 2 * inner, hidden_size, dtype=dtype, device=device))
        self.down_proj = nn.Parameter(torch.empty(held, hidden_size, inner, dtype=dtype, device=device))

    def views_of(self, module_name: str, parameter_name: str, parameter: Tensor) -> dict[str, CheckpointView]:
        """A checkpoint has three matrices for every expert, those held elsewhere included."""
        matrices = ("down_proj",) if parameter_name == "down_proj" else ("gate_proj", "up_proj")
        views = {}
        for expert in range(self.placement.num_experts):
            for i, matrix in enumerate(matrices):
                name = join_names(module_name, str(expert), matrix, "weight")
                views[name] = self._view(
                    parameter, expert - self.placement.first_expert, i, is_down=matrix == "down_proj"
                )
        return views

    def _view(self, parameter: Tensor, local_expert: int, index: int, *, is_down: bool) -> CheckpointView:
        """Of the ``index``-th matrix that ``parameter`` stacks for an expert."""
        whole, hidden, inner = self.intermediate_size, self.down_proj.shape[1], self.placement.intermediate_size
        columns = slice(self.placement.intermediate_start, self.placement.intermediate_stop)
        shape = (hidden, whole) if is_down else (whole, hidden)
        if not 0 <= local_expert < self.placement.num_local_experts:
            return CheckpointView(tensor=parameter.new_empty(0, 0), shape=shape, part=(slice(0, 0), slice(0, 0)))
        if is_down:
            return CheckpointView(tensor=parameter[local_expert], shape=shape, part=(slice(None), columns))
        rows = slice(index * inner, (index + 1) * inner)
        return CheckpointView(tensor=parameter[local_expert, rows], shape=shape, part=(columns,))

    def forward(self, x_MD: Tensor, routing: Routing, *, static: bool) -> tuple[Tensor, Tensor]:
        """This rank's part of the weighted sum, [M, D], and how many rows each expert here computed, int64 [E]."""
        mixed_MkD, counts_E = self._static(x_MD, routing) if static else self._sorted(x_MD, routing)
        # One place for each pair, summed in the router's order: no order of adding to depend on.
        return mixed_MkD.sum(dim=1).to(x_MD.dtype), counts_E

    def _sorted(self, x_MD: Tensor, routing: Routing) -> tuple[Tensor, Tensor]:
        """Weighted outputs, fp32 [M, k, D], and counts [E]; reads the counts on the host."""
        top_k = routing.expert_ids_Nk.shape[1]
        ids_P = routing.expert_ids_Nk.flatten().long()
        counts = torch.bincount(ids_P + 1, minlength=self.placement.num_local_experts + 1)
        nowhere, *held = counts.tolist()
        pairs_P = ids_P.argsort(stable=True)[nowhere:]  # by expert, by row within it
        rows = x_MD[pairs_P // top_k]
        outputs = [rows[:0]]
        start = 0
        for expert, count in enumerate(held):
            if count:
                outputs.append(self._swiglu(expert, rows[start : start + count]))
                start += count
        places = x_MD.new_zeros(ids_P.shape[0], x_MD.shape[1], dtype=torch.float32)
        places[pairs_P] = torch.cat(outputs).float() * routing.weights_Nk.flatten()[pairs_P, None]
        return places.view(x_MD.shape[0], top_k, x_MD.shape[1]), counts[1:]

    def _static(self, x_MD: Tensor, routing: Routing) -> tuple[Tensor, Tensor]:
        """As ``_sorted``, in shapes that do not depend on the routing."""
        places_MkD = x_MD.new_zeros(*routing.expert_ids_Nk.shape, x_MD.shape[1], dtype=torch.float32)
        counts = []
        for expert in range(self.placement.num_local_experts):
            chosen_Mk = routing.expert_ids_Nk == expert
            counts.append(chosen_Mk.sum())
            weighted_MkD = self._swiglu(expert, x_MD).float()[:, None] * routing.weights_Nk[:, :, None]
            places_MkD = torch.where(chosen_Mk[:, :, None], weighted_MkD, places_MkD)
        return places_MkD, torch.stack(counts)

    def _swiglu(self, expert: int, x_ND: Tensor) -> Tensor:
        gate_NI, up_NI = F.linear(x_ND, self.gate_up_proj[expert]).chunk(2, dim=-1)
        return F.linear(F.silu(gate_NI) * up_NI, self.down_proj[expert])


class SparseMoE(nn.Module):
    expert_load: Tensor  # int64 [num_experts]

    def __init__(
        self,
        hidden_size: int,
        moe: MoEConfig,
        *,
        parallel: ParallelState,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ) -> None:
        """Rows handed in are the same on all ranks of ``parallel.attn_tp``; every rank holds the whole router."""
        super().__init__()
        self.moe = moe
        placement = ExpertPlacement.of(moe, parallel)
        self.gate = Linear(hidden_size, moe.num_experts, bias=False, dtype=dtype, device=device)
        self.experts = StackedExperts(hidden_size, moe.moe_intermediate_size, placement, dtype=dtype, device=device)
        self._captured, self._eager = make_dispatchers(placement, parallel)
        self.register_buffer(
            "expert_load", torch.zeros(moe.num_experts, dtype=torch.int64, device=device), persistent=False
        )

    def forward(self, x_ND: Tensor, experts: ExpertMetadata) -> Tensor:
        dispatcher = self._captured if experts.captured else self._eager
        share = self._static_share if experts.captured and x_ND.device.type == "cuda" else self._sorted_share
        return dispatcher.run(x_ND, self.route(x_ND, experts), experts, share)

    def route(self, x_ND: Tensor, experts: ExpertMetadata) -> Routing:
        """The k experts of every row and their weights; padding rows go nowhere where the pass masks them."""
        logits_NE = self.gate(x_ND)
        weights_Nk, ids_Nk = logits_NE.softmax(dim=-1, dtype=torch.float32).topk(self.moe.num_experts_per_tok, dim=-1)
        if self.moe.norm_topk_prob:
            weights_Nk = weights_Nk / weights_Nk.sum(dim=-1, keepdim=True)
        ids_Nk = ids_Nk.to(torch.int32)
        if experts.mask_padded_tokens:
            padding_N = torch.arange(x_ND.shape[0], device=x_ND.device) >= experts.num_tokens_non_padded
            ids_Nk = ids_Nk.masked_fill(padding_N[:, None], -1)
        return Routing(ids_Nk, weights_Nk)

    def _sorted_share(self, x_MD: Tensor, routing: Routing) -> Tensor:
        return self._share(x_MD, routing, static=False)

    def _static_share(self, x_MD: Tensor, routing: Routing) -> Tensor:
        return self._share(x_MD, routing, static=True)

    def _share(self, x_MD: Tensor, routing: Routing, *, static: bool) -> Tensor:
        placement = self.experts.placement
        mixed_MD, counts_E = self.experts(x_MD, routing, static=static)
        self.expert_load[placement.first_expert : placement.first_expert + placement.num_local_experts] += counts_E
        out_MD: Tensor = mixed_MD
        return out_MD


class ExpertLoad:
    """``expert_load`` of whole models, by the name given to each; models without expert layers are left out."""

    def __init__(self, models: Mapping[str, nn.Module]) -> None:
        layers = {name: [m for m in model.modules() if isinstance(m, SparseMoE)] for name, model in models.items()}
        self._layers = {name: found for name, found in layers.items() if found}
        held = {m.moe.num_experts // m.experts.placement.num_local_experts for ms in self._layers.values() for m in ms}
        assert len(held) <= 1, f"experts of one engine are spread over {held} ranks"
        self.expert_parallel_size = next(iter(held), 1)  # 1 where every rank holds a slice of all

    def snapshot(self) -> dict[str, tuple[int, ...]]:
        """Rows each expert has computed on this rank, summed over a model's layers; index = global expert id."""
        return {
            name: tuple(torch.stack([layer.expert_load for layer in layers]).sum(dim=0).tolist())
            for name, layers in self._layers.items()
        }
