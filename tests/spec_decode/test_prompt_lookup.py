"""Prompt lookup against a search that tries everything."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from outrider.spec_decode.prompt_lookup import find_continuation


def brute_force(token_ids: list[int], *, max_ngram: int, min_ngram: int, num_tokens: int) -> list[int]:
    """Every pair of equal n-grams, the second at the end; longest first, then latest."""
    found = [
        (size, start)
        for size in range(min_ngram, max_ngram + 1)
        for start in range(len(token_ids) - size)
        if token_ids[start : start + size] == token_ids[len(token_ids) - size :]
    ]
    if not found or num_tokens <= 0:
        return []
    size, start = max(found)
    return token_ids[start + size :][:num_tokens]


@given(
    st.lists(st.integers(0, 2), min_size=1, max_size=14),
    st.integers(1, 4),
    st.integers(0, 3),
    st.integers(0, 6),
)
def test_equals_brute_force(token_ids: list[int], min_ngram: int, more: int, num_tokens: int) -> None:
    sizes = {"max_ngram": min_ngram + more, "min_ngram": min_ngram, "num_tokens": num_tokens}
    assert find_continuation(token_ids, **sizes) == brute_force(token_ids, **sizes)


def test_longest_wins_over_latest_and_latest_among_equals() -> None:
    sizes = {"max_ngram": 3, "min_ngram": 1, "num_tokens": 2}
    assert find_continuation([1, 2, 3, 7, 9, 3, 8, 1, 2, 3], **sizes) == [7, 9]
    assert find_continuation([3, 7, 7, 3, 8, 8, 3], **sizes) == [8, 8]
    assert find_continuation([4, 5, 6], **sizes) == []
    assert find_continuation([5, 5], **sizes) == [5]  # what follows may overlap the suffix itself
