"""Philox against its published vectors, and the numbers built on it."""

from __future__ import annotations

import pytest
import torch

from outrider.sampling.random import Role, derive_seed, philox4x32, philox_words, uniforms

# Known answers of the Random123 distribution (kat_vectors, philox4x32, 10 rounds).
VECTORS = [
    ([0] * 4, [0] * 2, [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]),
    ([0xFFFFFFFF] * 4, [0xFFFFFFFF] * 2, [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]),
    (
        [0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344],
        [0xA4093822, 0x299F31D0],
        [0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1],
    ),
]


@pytest.mark.parametrize(("counter", "key", "expected"), VECTORS)
def test_known_answers(counter: list[int], key: list[int], expected: list[int]) -> None:
    assert philox4x32(torch.tensor(counter)[:, None], torch.tensor(key)[:, None])[:, 0].tolist() == expected
    assert list(philox_words((counter[0], counter[1], counter[2], counter[3]), (key[0], key[1]))) == expected


def test_few_rows_get_the_numbers_of_many() -> None:
    names = [(seed * 0x9E3779B97F4A7C15 % 2**64, 7 * seed + 1, 5 * seed) for seed in range(40)]
    seeds, positions, rounds = (list(part) for part in zip(*names, strict=True))
    many = uniforms(seeds=seeds, positions=positions, role=Role.ACCEPT, round_positions=rounds)
    for size in (1, 3, 16):
        few = uniforms(seeds=seeds[:size], positions=positions[:size], role=Role.ACCEPT, round_positions=rounds[:size])
        assert torch.equal(few, many[:size])
    assert uniforms(seeds=[], positions=[], role=Role.ACCEPT, round_positions=[]).shape == (0,)


def test_rows_do_not_influence_each_other() -> None:
    counters = torch.tensor([counter for counter, _, _ in VECTORS]).T
    keys = torch.tensor([key for _, key, _ in VECTORS]).T
    assert philox4x32(counters, keys).T.tolist() == [expected for _, _, expected in VECTORS]


def test_counter_layout() -> None:
    """Position, role, round and 0, under the two halves of the seed; the first 27 + 26 bits of the words."""
    position, round_position, seed = 70_001, 69_998, 0xA4093822_299F31D0
    counter = torch.tensor([position, int(Role.RECOVER), round_position, 0])[:, None]
    words = philox4x32(counter, torch.tensor([0x299F31D0, 0xA4093822])[:, None])[:, 0].tolist()
    expected = ((words[0] >> 5) * 2**26 + (words[1] >> 6)) / 2**53
    got = uniforms(seeds=[seed], positions=[position], role=Role.RECOVER, round_positions=[round_position])
    assert got.dtype == torch.float64
    assert got.tolist() == [expected]


def test_every_part_of_the_name_matters() -> None:
    base = {"seeds": [5], "positions": [10], "role": [Role.TARGET], "round_positions": [9]}
    others = [{"seeds": [5 + 2**32]}, {"seeds": [6]}, {"positions": [11]}, {"round_positions": [8]}]
    others += [{"role": [role]} for role in Role if role is not Role.TARGET]
    numbers = [uniforms(**(base | other)).item() for other in [{}, *others]]  # type: ignore[arg-type]
    assert len(set(numbers)) == len(numbers)


def test_a_negative_seed_is_its_two_complement() -> None:
    def number(seed: int) -> float:
        return uniforms(seeds=[seed], positions=[1], role=Role.TARGET, round_positions=[0]).item()

    assert number(-1) == number(2**64 - 1)


def test_uniform_and_independent_between_roles() -> None:
    count = 20_000
    numbers = torch.stack(
        [uniforms(seeds=range(count), positions=[3] * count, role=role, round_positions=[2] * count) for role in Role]
    )
    assert numbers.min() >= 0.0
    assert numbers.max() < 1.0
    sigma = (1 / 12 / count) ** 0.5
    assert (numbers.mean(1) - 0.5).abs().max() < 4 * sigma
    correlation = torch.corrcoef(numbers) - torch.eye(len(Role))
    assert correlation.abs().max() < 4 / count**0.5


def test_derived_seeds() -> None:
    assert derive_seed(42, 0) == 42
    assert derive_seed(-1, 0) == 2**64 - 1
    seeds = {derive_seed(seed, index) for seed in (42, 43) for index in range(50)}
    assert len(seeds) == 100
    assert all(0 <= seed < 2**64 for seed in seeds)
    # Not the words of any draw of the request: the last counter word differs.
    assert max(seeds) > 2**63
