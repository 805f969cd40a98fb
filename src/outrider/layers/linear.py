"""Linear layers and the map from checkpoint names to their (possibly merged) weights.

A ``MergedLinear`` keeps several checkpoint matrices stacked in one weight so that one matmul serves all of them.
``checkpoint_views`` gives, for every tensor a checkpoint should hold, the view it belongs in: a loader copies into the
views and an exporter reads from them, so neither knows what is merged.

Shape legend: N rows, I input features, O output features.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor, nn


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
    """Several checkpoint matrices with the same input, stacked along the output in the order of ``shard_sizes``."""

    def __init__(
        self,
        in_features: int,
        shard_sizes: Mapping[str, int],
        *,
        bias: bool,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ) -> None:
        super().__init__(in_features, sum(shard_sizes.values()), bias=bias, dtype=dtype, device=device)
        self.shard_rows: dict[str, tuple[int, int]] = {}
        start = 0
        for name, size in shard_sizes.items():
            self.shard_rows[name] = (start, start + size)
            start += size

    def forward_from(self, x_NI: Tensor, *, first_shard: str) -> Tensor:
        """Outputs of ``first_shard`` and all shards after it, without computing those before."""
        start, _ = self.shard_rows[first_shard]
        return F.linear(x_NI, self.weight[start:], None if self.bias is None else self.bias[start:])


def checkpoint_views(module: nn.Module) -> dict[str, Tensor]:
    """Every checkpoint tensor of ``module`` by name, as a view (sharing storage) of the parameter that holds it.

    A shard of a ``MergedLinear`` is named as its sibling would be: ``self_attn.qkv_proj`` gives ``self_attn.q_proj``.
    A parameter shared by two modules (a tied head) appears once, under the name that comes first.
    """
    views: dict[str, Tensor] = {}
    seen: set[int] = set()
    for module_name, child in module.named_modules():
        for parameter_name, parameter in child.named_parameters(recurse=False):
            if id(parameter) in seen:
                continue
            seen.add(id(parameter))
            if isinstance(child, MergedLinear):
                parent = module_name.rpartition(".")[0]
                for shard, (start, stop) in child.shard_rows.items():
                    views[_join(parent, shard, parameter_name)] = parameter.data[start:stop]
            else:
                views[_join(module_name, parameter_name)] = parameter.data
    return views


def _join(*parts: str) -> str:
    return ".".join(part for part in parts if part)
