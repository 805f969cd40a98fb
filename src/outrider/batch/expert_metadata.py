"""What expert layers need to know of a pass: the part of a forward batch that ``layers.moe`` reads. No Optional field.

Every data-parallel rank takes part in the expert collectives of a pass, idle ones with zero real rows. Extents come
from the step plan, so all ranks hold the same ``padded_tokens``; the rows beyond ``num_tokens_non_padded`` are padding.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertMetadata:
    dp_rank: int
    padded_tokens: tuple[int, ...]  # rows every data-parallel rank brings at most, index = dp_rank; from the plan
    num_tokens_non_padded: Tensor  # int32 [1]: own real rows; the rest of the rows handed in are padding
    mask_padded_tokens: bool  # padding rows go to no expert (-1, never used as an index)
    captured: bool  # a tier's static shapes: only transports with static shapes may run

    @classmethod
    def single(cls, num_tokens: int) -> ExpertMetadata:
        """Of one rank alone, without padding."""
        return cls(
            dp_rank=0,
            padded_tokens=(num_tokens,),
            num_tokens_non_padded=torch.tensor([num_tokens], dtype=torch.int32),
            mask_padded_tokens=False,
            captured=False,
        )
