"""Which data-parallel rank gets the next request: the one that owes the fewest tokens.

A rank owes, for each of its unfinished requests, the prompt until the first token is there and the new tokens that may
still come. Pure bookkeeping; ties go to the lowest rank. Invariant: ``owed(rank)`` is the sum over its requests, and 0
when it has none.
"""

from __future__ import annotations


class Balancer:
    def __init__(self, num_ranks: int) -> None:
        assert num_ranks >= 1, num_ranks
        self._owed = [0] * num_ranks
        self._requests: dict[int, tuple[int, int]] = {}  # number: (rank, tokens owed)

    def owed(self, rank: int) -> int:
        return self._owed[rank]

    def choose(self) -> int:
        """The rank for a new request."""
        return min(range(len(self._owed)), key=lambda rank: self._owed[rank])

    def add(self, number: int, *, rank: int, tokens: int) -> None:
        assert number not in self._requests, f"request {number} is placed already"
        self._requests[number] = (rank, tokens)
        self._owed[rank] += tokens

    def update(self, number: int, *, tokens: int) -> None:
        """``tokens``: what its rank still owes to the request."""
        rank, before = self._requests[number]
        self._requests[number] = (rank, tokens)
        self._owed[rank] += tokens - before

    def remove(self, number: int) -> None:
        rank, tokens = self._requests.pop(number)
        self._owed[rank] -= tokens
