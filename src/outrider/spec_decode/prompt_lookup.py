"""Prompt lookup: propose what followed the latest earlier occurrence of the sequence's last n tokens.

No model, no pass. The baseline every DSpark figure is compared with (after Saxena's prompt lookup decoding, 2023, and
the n-gram proposers of other engines).
"""

from __future__ import annotations

from collections.abc import Sequence


def find_continuation(token_ids: Sequence[int], *, max_ngram: int, min_ngram: int, num_tokens: int) -> list[int]:
    """At most ``num_tokens`` ids that followed the latest earlier match of the longest matching suffix n-gram.

    token_ids: the whole sequence, prompt and output, the anchor last. The longest n-gram wins, of equal ones the
    latest.
    """
    length = len(token_ids)
    if num_tokens <= 0:
        return []
    for size in range(min(max_ngram, length - 1), min_ngram - 1, -1):
        suffix = list(token_ids[length - size :])
        last = suffix[-1]
        for end in range(length - 2, size - 2, -1):
            if token_ids[end] == last and list(token_ids[end - size + 1 : end + 1]) == suffix:
                return list(token_ids[end + 1 : end + 1 + num_tokens])
    return []
