"""Rotary position embedding, half-split: the frequencies every supported ``rope_type`` means, and the rotation.

``RotaryEmbedding`` turns positions into a ``RotaryPhase`` once per pass; all layers rotate with it. The phase of a row
depends on its own position alone. That is also true of ``dynamic``, where the published rule looks at the longest
sequence of the batch: here the sequence length is the row's own position + 1, which is what the published rule gives
when tokens are decoded one at a time, and which no verify width or neighbour can change.

Shape legend: N rows, H heads, D head dimension, E = D / 2 rotary pairs.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from outrider.config import RopeConfig


@dataclass(frozen=True, slots=True)
class RotaryPhase:
    cos_NE: Tensor  # fp32 [N, E]
    sin_NE: Tensor  # fp32 [N, E]


class RotaryEmbedding:
    """Phases for given positions. Holds only derived constants, so it is neither a module nor in any checkpoint."""

    def __init__(
        self,
        rope: RopeConfig,
        *,
        head_dim: int,
        max_position_embeddings: int,
        device: torch.device | str = "cpu",
    ) -> None:
        self.rope = rope
        self.head_dim = head_dim
        self.max_position_embeddings = max_position_embeddings
        self.inv_freq_E = inverse_frequencies(rope, head_dim).to(device)
        self.attention_scaling = _yarn_attention_scaling(rope) if rope.rope_type == "yarn" else 1.0

    def __call__(self, positions_N: Tensor) -> RotaryPhase:
        inv_freq = self._dynamic_frequencies(positions_N) if self.rope.rope_type == "dynamic" else self.inv_freq_E
        angles_NE = positions_N.to(torch.float32)[:, None] * inv_freq
        return RotaryPhase(angles_NE.cos() * self.attention_scaling, angles_NE.sin() * self.attention_scaling)

    def _dynamic_frequencies(self, positions_N: Tensor) -> Tensor:
        """NTK-scaled base by the row's own sequence length: fp32 [N, E]."""
        limit = self.max_position_embeddings
        length_N = (positions_N + 1).clamp(min=limit).to(torch.float32)
        growth_N = self.rope.factor * length_N / limit - (self.rope.factor - 1)
        base_N = self.rope.theta * growth_N ** (self.head_dim / (self.head_dim - 2))
        exponents_E = torch.arange(0, self.head_dim, 2, dtype=torch.float32, device=positions_N.device) / self.head_dim
        return 1.0 / base_N[:, None] ** exponents_E


def apply_rotary(x_NHD: Tensor, phase: RotaryPhase) -> Tensor:
    """Rotate every head of every row; fp32 inside, the result has the input's dtype."""
    cos_N1E, sin_N1E = phase.cos_NE[:, None, :], phase.sin_NE[:, None, :]
    first_NHE, second_NHE = x_NHD.chunk(2, dim=-1)
    rotated_NHD = torch.cat(
        (first_NHE * cos_N1E - second_NHE * sin_N1E, second_NHE * cos_N1E + first_NHE * sin_N1E), dim=-1
    )
    return rotated_NHD.to(x_NHD.dtype)


def inverse_frequencies(rope: RopeConfig, head_dim: int) -> Tensor:
    """fp32 [E], at the length the model was trained for (``dynamic`` grows beyond it by position)."""
    exponents_E = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
    plain_E = 1.0 / rope.theta**exponents_E
    match rope.rope_type:
        case "default" | "dynamic":
            return plain_E
        case "linear":
            return plain_E / rope.factor
        case "llama3":
            return _llama3_frequencies(plain_E, rope)
        case "yarn":
            return _yarn_frequencies(plain_E, rope, head_dim)


def _llama3_frequencies(plain_E: Tensor, rope: RopeConfig) -> Tensor:
    """Long wavelengths are slowed by ``factor``, short ones kept, those between blended by where they lie."""
    turns_E = rope.original_max_position_embeddings * plain_E / (2 * math.pi)  # full turns within the trained context
    share_E = (turns_E - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    share_E = share_E.clamp(0.0, 1.0)
    return (1 - share_E) * plain_E / rope.factor + share_E * plain_E


def _yarn_frequencies(plain_E: Tensor, rope: RopeConfig, head_dim: int) -> Tensor:
    """Dimensions turning more than ``beta_fast`` times are kept, fewer than ``beta_slow`` interpolated, else a ramp."""

    def dimension_of(turns: float) -> float:
        context = rope.original_max_position_embeddings
        return head_dim * math.log(context / (turns * 2 * math.pi)) / (2 * math.log(rope.theta))

    low, high = dimension_of(rope.beta_fast), dimension_of(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    if low == high:
        high += 0.001  # the ramp needs a width
    ramp_E = ((torch.arange(head_dim // 2, dtype=torch.float32) - low) / (high - low)).clamp(0.0, 1.0)
    return ramp_E * plain_E / rope.factor + (1 - ramp_E) * plain_E


def _yarn_attention_scaling(rope: RopeConfig) -> float:
    if rope.attention_factor:
        return rope.attention_factor

    def scale(mscale: float) -> float:
        return 0.1 * mscale * math.log(rope.factor) + 1.0 if rope.factor > 1 else 1.0

    if rope.mscale and rope.mscale_all_dim:
        return scale(rope.mscale) / scale(rope.mscale_all_dim)
    return scale(1.0)
