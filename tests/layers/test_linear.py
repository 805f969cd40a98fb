"""Merged weights and the checkpoint's view of them."""

from __future__ import annotations

import torch
from torch import nn

from outrider.layers.checkpoint import checkpoint_views
from outrider.layers.linear import Linear, MergedLinear
from outrider.layers.mlp import SwiGLU
from outrider.layers.norm import RMSNorm
from outrider.parallel.communicator import SingleRankCommunicator


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = Linear(3, 2, bias=False)
        self.second = Linear(3, 2, bias=True)
        self.second.weight = self.first.weight


def test_views_name_and_share_the_merged_shards() -> None:
    mlp = SwiGLU(3, 4, bias=True, tp=SingleRankCommunicator())
    views = checkpoint_views(mlp)
    assert {name: view.shape for name, view in views.items()} == {
        "gate_proj.weight": (4, 3),
        "gate_proj.bias": (4,),
        "up_proj.weight": (4, 3),
        "up_proj.bias": (4,),
        "down_proj.weight": (3, 4),
        "down_proj.bias": (3,),
    }
    views["up_proj.weight"].tensor.fill_(7.0)
    assert bool((mlp.gate_up_proj.weight[4:] == 7.0).all())


def test_views_list_a_shared_parameter_once() -> None:
    assert list(checkpoint_views(Tied())) == ["first.weight", "second.bias"]


def test_forward_from_skips_the_shards_before() -> None:
    linear = MergedLinear(3, {"a": 2, "b": 4, "c": 1}, bias=True, tp=SingleRankCommunicator())
    nn.init.normal_(linear.weight, generator=torch.Generator().manual_seed(0))
    assert linear.bias is not None
    nn.init.normal_(linear.bias, generator=torch.Generator().manual_seed(1))
    x = torch.randn(5, 3, generator=torch.Generator().manual_seed(2))
    torch.testing.assert_close(linear.forward_from(x, first_shard="b"), linear(x)[:, 2:])


def test_rms_norm_computes_in_fp32() -> None:
    norm = RMSNorm(64, eps=1e-6, dtype=torch.bfloat16)
    nn.init.normal_(norm.weight, generator=torch.Generator().manual_seed(0))
    x = (torch.randn(3, 64, generator=torch.Generator().manual_seed(1)) * 50).bfloat16()
    wide = x.double()
    exact = wide / (wide.pow(2).mean(-1, keepdim=True) + 1e-6).sqrt() * norm.weight.double()
    torch.testing.assert_close(norm(x), exact.bfloat16(), rtol=2**-7, atol=0)
