"""Token embedding and LM head. Tied models give the head the embedding's own parameter.

The embedding is whole on every rank, the head shared over the ranks of one attention group: each multiplies its rows
of the vocabulary, and the logits are gathered, so that all ranks that share requests see the same bits and nothing
crosses data-parallel ranks.

Shape legend: N rows, K rows that need logits, D hidden size, V vocabulary, S this rank's share of it.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from outrider.layers.checkpoint import CheckpointView, join_names, size_for_rank, slice_for_rank
from outrider.parallel.communicator import Communicator


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
    """Hidden states to fp32 logits; the matmul runs in the weight's dtype.

    ``weight`` is all rows [V, D] (a tied embedding, of which only the own rows are multiplied) or the own rows [S, D].
    """

    def __init__(self, weight: nn.Parameter, *, vocab_size: int, tp: Communicator) -> None:
        super().__init__()
        self.vocab_size = vocab_size
        self.weight = weight
        self._tp = tp
        self._own_rows = slice_for_rank("vocab_size", vocab_size, tp)
        self._is_whole = weight.shape[0] == vocab_size
        own = size_for_rank("vocab_size", vocab_size, tp)
        assert self._is_whole or weight.shape[0] == own, f"{weight.shape[0]} rows are neither {own} nor {vocab_size}"

    def forward(self, hidden_KD: Tensor) -> Tensor:
        weight_SD = self.weight[self._own_rows] if self._is_whole else self.weight
        logits_KS = F.linear(hidden_KD, weight_SD)
        if self._tp.size == 1:
            return logits_KS.float()
        gathered_TKS = self._tp.all_gather(logits_KS).view(self._tp.size, *logits_KS.shape)
        return gathered_TKS.transpose(0, 1).reshape(hidden_KD.shape[0], self.vocab_size).float()

    def whole_weight(self) -> nn.Parameter:
        """[V, D]: the parameter itself, or all ranks' rows gathered into a new one (then all of them call this)."""
        if self._is_whole:
            return self.weight
        return nn.Parameter(self._tp.all_gather(self.weight.detach()), requires_grad=False)

    def views_of(self, module_name: str, parameter_name: str, parameter: Tensor) -> dict[str, CheckpointView]:
        part = () if self._is_whole else (self._own_rows,)
        shape = (self.vocab_size, parameter.shape[1])
        return {join_names(module_name, parameter_name): CheckpointView(tensor=parameter, shape=shape, part=part)}
