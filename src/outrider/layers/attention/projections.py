"""What surrounds attention in a layer: q/k/v projection, per-head norms, rotation, and the output projection.

It holds no back end and no cache, so the target's layer, the drafter's block and the drafter's context path (which
needs keys and values only) share it. Ranks of ``tp`` share the heads, so that a key head is where its query heads are;
one all-reduce, after the output projection, sums what they give.

Shape legend: N rows, M hidden size, Hq query heads, Hkv key/value heads (this rank's share), D head dimension.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from outrider.config import ModelConfig
from outrider.layers.checkpoint import size_for_rank
from outrider.layers.linear import MergedLinear, RowParallelLinear
from outrider.layers.norm import RMSNorm
from outrider.layers.rotary import RotaryPhase, apply_rotary
from outrider.ops.fused_training import fused, normed_rotated_heads
from outrider.parallel.communicator import Communicator


class AttentionProjections(nn.Module):
    def __init__(
        self,
        config: ModelConfig,
        *,
        tp: Communicator,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ) -> None:
        super().__init__()
        self.num_heads = size_for_rank("num_heads", config.num_heads, tp)
        self.num_kv_heads = size_for_rank("num_kv_heads", config.num_kv_heads, tp)
        self.head_dim = config.head_dim
        self.scale: float = config.head_dim**-0.5
        query_size = config.num_heads * config.head_dim
        kv_size = config.num_kv_heads * config.head_dim
        self.qkv_proj = MergedLinear(
            config.hidden_size,
            {"q_proj": query_size, "k_proj": kv_size, "v_proj": kv_size},
            bias=config.attention_bias,
            tp=tp,
            dtype=dtype,
            device=device,
        )
        self.o_proj = RowParallelLinear(
            query_size, config.hidden_size, bias=config.attention_output_bias, tp=tp, dtype=dtype, device=device
        )
        self.q_norm: nn.Module = nn.Identity()
        self.k_norm: nn.Module = nn.Identity()
        if config.qk_norm:
            self.q_norm = RMSNorm(config.head_dim, eps=config.rms_norm_eps, dtype=dtype, device=device)
            self.k_norm = RMSNorm(config.head_dim, eps=config.rms_norm_eps, dtype=dtype, device=device)

    def query_key_value(self, hidden_NM: Tensor, phase: RotaryPhase) -> tuple[Tensor, Tensor, Tensor]:
        """Normed and rotated query [N, Hq, D], normed and rotated key [N, Hkv, D], value [N, Hkv, D]."""
        qkv_NHD = self._heads(self.qkv_proj(hidden_NM))
        if (at_once := self._fused(qkv_NHD, phase)) is not None:
            return at_once
        query_NHD = self.q_norm(qkv_NHD[:, : self.num_heads])
        key_NHD = self.k_norm(qkv_NHD[:, self.num_heads : -self.num_kv_heads])
        return apply_rotary(query_NHD, phase), apply_rotary(key_NHD, phase), qkv_NHD[:, -self.num_kv_heads :]

    def key_value(self, hidden_NM: Tensor, phase: RotaryPhase) -> tuple[Tensor, Tensor]:
        """As ``query_key_value``, for rows that are only ever attended to."""
        kv_NHD = self._heads(self.qkv_proj.forward_from(hidden_NM, first_shard="k_proj"))
        if (at_once := self._fused(kv_NHD, phase)) is not None:
            return at_once[1:]
        return apply_rotary(self.k_norm(kv_NHD[:, : self.num_kv_heads]), phase), kv_NHD[:, self.num_kv_heads :]

    def _fused(self, heads_NHD: Tensor, phase: RotaryPhase) -> tuple[Tensor, Tensor, Tensor] | None:
        """Query (perhaps none), key and value heads where one loop makes them all, else None."""
        if not (isinstance(self.q_norm, RMSNorm) and isinstance(self.k_norm, RMSNorm) and fused()):
            return None
        return normed_rotated_heads(
            heads_NHD,
            self.q_norm.weight,
            self.k_norm.weight,
            cos=phase.cos_NE,
            sin=phase.sin_NE,
            num_kv_heads=self.num_kv_heads,
            eps=self.k_norm.eps,
        )

    def _heads(self, projected_NX: Tensor) -> Tensor:
        return projected_NX.view(-1, projected_NX.shape[-1] // self.head_dim, self.head_dim)

    def output(self, attention_NHD: Tensor) -> Tensor:
        """Back to the hidden size: [N, M]."""
        out_NM: Tensor = self.o_proj(attention_NHD.flatten(-2))
        return out_NM
