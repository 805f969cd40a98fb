"""Scaled dot-product attention in which a position a row may not see cannot matter, whatever its bits.

A masked position gets weight 0, and torch multiplies its value by that all the same: 0 x NaN is NaN. In a verify pass
a rejected draft lies behind its anchor, so keys and values of its that are not finite would end the anchor's request,
which the target alone would have answered.

Shape legend: R requests, H heads, Q query rows, T positions, D head dimension.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def masked_attention(
    query_RHQD: Tensor, key_RHTD: Tensor, value_RHTD: Tensor, mask_R1QT: Tensor, *, scale: float
) -> Tensor:
    """[R, H, Q, D]. The usual case costs a look at the result, on the host; only rows that need it are done again."""
    out = F.scaled_dot_product_attention(query_RHQD, key_RHTD, value_RHTD, attn_mask=mask_R1QT, scale=scale)
    finite_RHQ1 = out.isfinite().all(-1, keepdim=True)
    if bool(finite_RHQ1.all()):
        return out
    hidden_R1QT = mask_R1QT.logical_not()
    scores_RHQT = (query_RHQD.float() @ key_RHTD.float().mT * scale).masked_fill(hidden_R1QT, -torch.inf)
    value_finite_RHT = value_RHTD.isfinite().all(-1)
    known_RHTD = torch.where(value_finite_RHT[..., None], value_RHTD, 0.0)
    spelled_out = (scores_RHQT.softmax(-1) @ known_RHTD.float()).to(out.dtype)
    sees_bad_RHQ = (mask_R1QT & value_finite_RHT.logical_not()[:, :, None]).any(-1)
    return torch.where(finite_RHQ1, out, spelled_out.masked_fill(sees_bad_RHQ[..., None], torch.nan))


def guarded_attention(
    query_RHQD: Tensor, key_RHTD: Tensor, value_RHTD: Tensor, mask_R1QT: Tensor, *, scale: float
) -> Tensor:
    """The same for keys and values that are not finite, and nothing read on the host, as a captured pass needs it.

    A masked key so large that its score overflows still makes its row NaN here; a row that sees an infinite key is NaN.
    """
    finite_RHT = key_RHTD.isfinite().all(-1) & value_RHTD.isfinite().all(-1)
    key_RHTD, value_RHTD = (torch.where(finite_RHT[..., None], part, 0.0) for part in (key_RHTD, value_RHTD))
    out = F.scaled_dot_product_attention(query_RHQD, key_RHTD, value_RHTD, attn_mask=mask_R1QT, scale=scale)
    sees_bad_RHQ = (mask_R1QT & finite_RHT.logical_not()[:, :, None]).any(-1)
    return out.masked_fill(sees_bad_RHQ[..., None], torch.nan)
