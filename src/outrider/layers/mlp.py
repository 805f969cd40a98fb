"""SwiGLU feed-forward: ``down(silu(gate(x)) * up(x))``, gate and up in one matmul.

Ranks of ``tp`` share the intermediate features; one all-reduce sums what they give.

Shape legend: N rows, D hidden size, I intermediate size (this rank's share).
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from outrider.layers.linear import MergedLinear, RowParallelLinear
from outrider.ops.fused_training import fused, swiglu
from outrider.parallel.communicator import Communicator


class SwiGLU(nn.Module):
    def __init__(
        self,
        hidden_size: int,
        intermediate_size: int,
        *,
        bias: bool,
        tp: Communicator,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ) -> None:
        super().__init__()
        shards = {"gate_proj": intermediate_size, "up_proj": intermediate_size}
        self.gate_up_proj = MergedLinear(hidden_size, shards, bias=bias, tp=tp, dtype=dtype, device=device)
        self.down_proj = RowParallelLinear(intermediate_size, hidden_size, bias=bias, tp=tp, dtype=dtype, device=device)

    def forward(self, x_ND: Tensor) -> Tensor:
        gate_up_NX = self.gate_up_proj(x_ND)
        if fused():
            activated_NI = swiglu(gate_up_NX)
        else:
            gate_NI, up_NI = gate_up_NX.chunk(2, dim=-1)
            activated_NI = F.silu(gate_NI) * up_NI
        out_ND: Tensor = self.down_proj(activated_NI)
        return out_ND
