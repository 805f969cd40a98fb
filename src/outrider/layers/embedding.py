"""Token embedding and LM head. Tied models give the head the embedding's own parameter.

Shape legend: N rows, K rows that need logits, D hidden size, V vocabulary.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Embedding(nn.Module):
    def __init__(
        self,
        vocab_size: int,
        hidden_size: int,
        *,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(vocab_size, hidden_size, dtype=dtype, device=device))  # [V, D]

    def forward(self, token_ids_N: Tensor) -> Tensor:
        return F.embedding(token_ids_N, self.weight)


class LMHead(nn.Module):
    """Hidden states to fp32 logits; the matmul runs in the weight's dtype."""

    def __init__(self, weight_VD: nn.Parameter) -> None:
        super().__init__()
        self.weight = weight_VD

    def forward(self, hidden_KD: Tensor) -> Tensor:
        return F.linear(hidden_KD, self.weight).float()
