"""Linear layers, whole or shared by the ranks of a group.

A ``MergedLinear`` keeps several checkpoint matrices stacked in one weight so that one matmul serves all of them; ranks
share its output features (column-parallel), and no result crosses ranks. A ``RowParallelLinear`` takes up such shared
features as its input: ranks multiply what they have, and one all-reduce sums the results. A group of one is the plain
layer.

Shape legend: N rows, I input features, O output features; of this rank, where they are shared.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from outrider.layers.checkpoint import CheckpointView, join_names, size_for_rank, slice_for_rank
from outrider.parallel.communicator import Communicator


class Linear(nn.Module):
    """``y = x W^T (+ b)``. Weights are left uninitialised: whoever constructs it loads or initialises them."""

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        bias: bool,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ) -> None:
        super().__init__()
        self.in_features = in_features
        self.out_features = out_features
        self.weight = nn.Parameter(torch.empty(out_features, in_features, dtype=dtype, device=device))  # [O, I]
        self.bias = nn.Parameter(torch.empty(out_features, dtype=dtype, device=device)) if bias else None  # [O]

    def forward(self, x_NI: Tensor) -> Tensor:
        return F.linear(x_NI, self.weight, self.bias)


class MergedLinear(Linear):
    """Several checkpoint matrices with the same input, stacked along the output in the order of ``shard_sizes``.

    ``shard_sizes`` are those of the checkpoint; a rank of ``tp`` holds its share of each, so that what belongs together
    (a query head and its key head, a gate and its up column) is on one rank. A shard is named in checkpoints as its
    sibling would be: ``self_attn.qkv_proj`` holds ``self_attn.q_proj``.
    """

    def __init__(
        self,
        in_features: int,
        shard_sizes: Mapping[str, int],
        *,
        bias: bool,
        tp: Communicator,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ) -> None:
        shares = {name: size_for_rank(name, size, tp) for name, size in shard_sizes.items()}
        super().__init__(in_features, sum(shares.values()), bias=bias, dtype=dtype, device=device)
        self.shard_rows: dict[str, tuple[int, int]] = {}  # of the own weight
        self._stored = {name: (size, slice_for_rank(name, size, tp)) for name, size in shard_sizes.items()}
        start = 0
        for name, size in shares.items():
            self.shard_rows[name] = (start, start + size)
            start += size

    def forward_from(self, x_NI: Tensor, *, first_shard: str) -> Tensor:
        """Outputs of ``first_shard`` and all shards after it, without computing those before."""
        start, _ = self.shard_rows[first_shard]
        return F.linear(x_NI, self.weight[start:], None if self.bias is None else self.bias[start:])

    def views_of(self, module_name: str, parameter_name: str, parameter: Tensor) -> dict[str, CheckpointView]:
        parent = module_name.rpartition(".")[0]
        views = {}
        for shard, (start, stop) in self.shard_rows.items():
            size, part = self._stored[shard]
            views[join_names(parent, shard, parameter_name)] = CheckpointView(
                tensor=parameter[start:stop], shape=(size, *parameter.shape[1:]), part=(part,)
            )
        return views


class RowParallelLinear(Linear):
    """``y = sum over ranks of x W^T (+ b)``: every rank of ``tp`` brings its share of the input features.

    The result is whole and has the same bits on every rank. The bias is whole too and added once, after the sum.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        bias: bool,
        tp: Communicator,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ) -> None:
        share = size_for_rank("in_features", in_features, tp)
        super().__init__(share, out_features, bias=bias, dtype=dtype, device=device)
        self._tp = tp
        self._stored_columns = in_features, slice_for_rank("in_features", in_features, tp)

    def forward(self, x_NI: Tensor) -> Tensor:
        if self._tp.size == 1:
            return super().forward(x_NI)
        out_NO = self._tp.all_reduce(F.linear(x_NI, self.weight))
        return out_NO if self.bias is None else out_NO + self.bias

    def views_of(self, module_name: str, parameter_name: str, parameter: Tensor) -> dict[str, CheckpointView]:
        name = join_names(module_name, parameter_name)
        if parameter_name == "bias":
            return {name: CheckpointView.whole(parameter)}
        columns, part = self._stored_columns
        shape = (parameter.shape[0], columns)
        return {name: CheckpointView(tensor=parameter, shape=shape, part=(slice(None), part))}
