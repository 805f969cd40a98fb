"""Placing requests: fewest owed tokens first, ties to the lowest rank, sums that stay exact."""

from __future__ import annotations

import random

from outrider.engine.balancer import Balancer


def test_the_rank_that_owes_least_is_next() -> None:
    balancer = Balancer(3)
    placed = []
    for number, tokens in enumerate((10, 4, 7, 1, 9)):
        placed.append(balancer.choose())
        balancer.add(number, rank=placed[-1], tokens=tokens)
    assert placed == [0, 1, 2, 1, 1], "owed before each: 0 0 0, 10 0 0, 10 4 0, 10 4 7, 10 5 7"
    balancer.update(0, tokens=2)
    assert balancer.choose() == 0
    balancer.remove(4)
    assert [balancer.owed(rank) for rank in range(3)] == [2, 5, 7]


def test_owed_tokens_are_the_sum_over_requests_whatever_the_order() -> None:
    rng = random.Random(0)
    balancer = Balancer(4)
    expected: dict[int, tuple[int, int]] = {}
    for number in range(500):
        rank, tokens = balancer.choose(), rng.randrange(100)
        sums = [sum(t for r, t in expected.values() if r == other) for other in range(4)]
        assert rank == sums.index(min(sums))
        balancer.add(number, rank=rank, tokens=tokens)
        expected[number] = (rank, tokens)
        other = rng.choice(list(expected))
        if rng.random() < 0.5:
            expected[other] = (expected[other][0], rng.randrange(100))
            balancer.update(other, tokens=expected[other][1])
        else:
            del expected[other]
            balancer.remove(other)
    for number in expected:
        balancer.remove(number)
    assert [balancer.owed(rank) for rank in range(4)] == [0] * 4
