"""RMSNorm over the last dimension, computed in fp32 whatever the dtype of input and weight.

Shape legend: N rows, D normalised features (the hidden size, or a head's dimension).
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from outrider.ops.fused_training import fused, rms_norm


class RMSNorm(nn.Module):
    def __init__(
        self,
        size: int,
        *,
        eps: float,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ) -> None:
        super().__init__()
        self.size = size
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(size, dtype=dtype, device=device))  # [D]

    def forward(self, x_ND: Tensor) -> Tensor:
        if fused():
            return rms_norm(x_ND, self.weight, self.eps)
        # F.rms_norm accumulates and scales bf16 input in fp32 and rounds once, at the end.
        return F.rms_norm(x_ND, (self.size,), self.weight.to(x_ND.dtype), self.eps)
