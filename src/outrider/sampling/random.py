"""Counter-based random numbers: Philox4x32-10 (Salmon et al., SC 2011), vectorised over rows.

There is no stream to advance and so none to get out of step: a number is named by the sequence's seed (the key) and
by (position of the token, role, anchor position of the round) (the counter). Roles keep what one round draws at one
position independent: with one number for both proposing and accepting, acceptance would depend on the draft.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum

import torch
from torch import Tensor

_MASK32 = 0xFFFFFFFF
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)  # of counter words 0 and 2
_WEYL = (0x9E3779B9, 0xBB67AE85)  # added to the key after each round
_NUM_ROUNDS = 10
_FEW_ROWS = 16  # up to so many, Python's integers take less time than the calls of the vectorised form
_SEED_DOMAIN = 1  # last counter word of derived seeds; draws use 0


class Role(IntEnum):
    """What a random number decides."""

    TARGET = 0  # a token from the target's distribution
    PROPOSE = 1  # a draft
    ACCEPT = 2  # whether a draft is accepted
    RECOVER = 3  # the token in place of a rejected draft


def philox4x32(counter_4N: Tensor, key_2N: Tensor) -> Tensor:
    """Ten rounds; all words int64 in 0..2**32-1. Returns [4, N]."""
    # int64 products wrap modulo 2**64, which leaves both 32-bit halves right once the shift's sign bits are masked.
    device = counter_4N.device
    multiplier_21 = torch.tensor(_MULTIPLIERS, dtype=torch.int64, device=device)[:, None]
    weyl_21 = torch.tensor(_WEYL, dtype=torch.int64, device=device)[:, None]
    even_2N, odd_2N = counter_4N[0::2], counter_4N[1::2]
    key = key_2N
    for _ in range(_NUM_ROUNDS):
        product_2N = even_2N * multiplier_21
        high_2N = (product_2N >> 32) & _MASK32
        even_2N = high_2N.flip(0) ^ odd_2N ^ key
        odd_2N = (product_2N & _MASK32).flip(0)
        key = (key + weyl_21) & _MASK32
    return torch.stack((even_2N[0], odd_2N[0], even_2N[1], odd_2N[1]))


def philox_words(counter: tuple[int, int, int, int], key: tuple[int, int]) -> tuple[int, int, int, int]:
    """The same for one counter, in Python's integers."""
    word_0, word_1, word_2, word_3 = counter
    key_0, key_1 = key
    for _ in range(_NUM_ROUNDS):
        product_0, product_2 = word_0 * _MULTIPLIERS[0], word_2 * _MULTIPLIERS[1]
        word_0, word_1 = (product_2 >> 32) ^ word_1 ^ key_0, product_2 & _MASK32
        word_2, word_3 = (product_0 >> 32) ^ word_3 ^ key_1, product_0 & _MASK32
        key_0, key_1 = (key_0 + _WEYL[0]) & _MASK32, (key_1 + _WEYL[1]) & _MASK32
    return word_0, word_1, word_2, word_3


def uniforms(
    *, seeds: Sequence[int], positions: Sequence[int], role: Role | Sequence[Role], round_positions: Sequence[int]
) -> Tensor:
    """One number in [0, 1) with 53 random bits per row, float64 [N] on the CPU."""
    num_rows = len(seeds)
    assert len(positions) == len(round_positions) == num_rows, "one seed, position and round per row"
    roles = [int(role)] * num_rows if isinstance(role, Role) else [int(r) for r in role]
    if num_rows <= _FEW_ROWS:
        numbers = []
        for position, role_number, round_position, seed in zip(positions, roles, round_positions, seeds, strict=True):
            words = philox_words((position, role_number, round_position, 0), (seed & _MASK32, (seed >> 32) & _MASK32))
            numbers.append(((words[0] >> 5) << 26 | words[1] >> 6) * 2.0**-53)  # 27 + 26 bits
        return torch.tensor(numbers, dtype=torch.float64)
    counter_4N = torch.tensor([positions, roles, round_positions, [0] * num_rows], dtype=torch.int64)
    low = [seed & _MASK32 for seed in seeds]
    high = [(seed >> 32) & _MASK32 for seed in seeds]
    words_4N = philox4x32(counter_4N, torch.tensor([low, high], dtype=torch.int64))
    bits_N = ((words_4N[0] >> 5) << 26) | (words_4N[1] >> 6)  # 27 + 26 bits
    return bits_N.double() * 2.0**-53


def derive_seed(seed: int, index: int) -> int:
    """Seed of the ``index``-th of n samples of a request, in 0..2**64-1; sample 0 keeps the request's own."""
    seed %= 2**64
    if index == 0:
        return seed
    counter_41 = torch.tensor([[index], [0], [0], [_SEED_DOMAIN]], dtype=torch.int64)
    words = philox4x32(counter_41, torch.tensor([[seed & _MASK32], [seed >> 32]], dtype=torch.int64))[:2, 0].tolist()
    return int(words[0]) | int(words[1]) << 32
