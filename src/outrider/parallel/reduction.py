"""The one way ranks' tensors are added: in rank order, in float32 where the dtype is shorter, rounded once.

So a sum has the same bits on every rank and on every transport that uses this, and an element's bits do not depend on
where in the tensor it lies or on what else is summed with it (a ring's order of adding depends on both).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def sum_in_rank_order(parts: Sequence[Tensor]) -> Tensor:
    """A new tensor; ``parts`` are of one shape and dtype, index = rank."""
    dtype = parts[0].dtype
    wide = torch.float32 if dtype in (torch.bfloat16, torch.float16) else dtype
    total = parts[0].to(wide, copy=True)
    for part in parts[1:]:
        total += part
    return total.to(dtype)
