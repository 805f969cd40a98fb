"""Stop events inside an accepted run, and stop strings across tokens, whatever the cut of the text into tokens."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.sampling.helpers import EOS, make_state

from outrider.sampling.stop import StopStringMatcher, check_stop


@pytest.mark.parametrize(
    ("params", "tokens", "expected"),
    [
        ({}, [5, 6, 7], (3, None, None)),
        ({}, [5, EOS, 7], (2, "stop", None)),
        ({"ignore_eos": True}, [5, EOS, 7], (3, None, None)),
        ({"stop_token_ids": [7, 6]}, [5, 6, 7], (2, "stop", 6)),
        ({"stop_token_ids": [6]}, [5, EOS, 6], (2, "stop", None)),
        ({"stop_token_ids": [EOS]}, [EOS], (1, "stop", None)),
        ({"stop_token_ids": [EOS], "ignore_eos": True}, [EOS], (1, "stop", EOS)),
        ({}, [5, 6, 7, 8, 9], (4, "length", None)),
        ({}, [5, 6, 7, EOS, 9], (4, "stop", None)),
        ({}, [5, 6, 7, 8, EOS], (4, "length", None)),
        ({"min_tokens": 3}, [EOS, 5, 6], (3, None, None)),
        ({"min_tokens": 3, "stop_token_ids": [6]}, [6, 6, 6], (2, "stop", 6)),
        ({"min_tokens": 9}, [EOS, 5, 6, EOS], (4, "length", None)),
        ({}, [], (0, None, None)),
    ],
)
def test_first_event_wins(params: dict[str, Any], tokens: list[int], expected: tuple[Any, ...]) -> None:
    """The sequence has emitted 2 of at most 6 tokens."""
    state = make_state(output=[8, 8], **params)
    assert tuple(check_stop(state, tokens, max_new_tokens=6)) == expected
    assert list(state.output_token_ids) == [8, 8]


def run(matcher: StopStringMatcher, deltas: list[str]) -> tuple[str, int | None, str | None]:
    result = matcher.feed(deltas)
    text = result.text if result.num_kept is not None else result.text + matcher.flush()
    return text, result.num_kept, result.stop_reason


@pytest.mark.parametrize(
    ("stop", "deltas", "excluded", "included", "num_kept", "reason"),
    [
        (["END"], ["a ", "E", "N", "D!"], "a ", "a END", 4, "END"),
        (["END"], ["xENDyEND"], "x", "xEND", 1, "END"),
        (["END"], ["a", "EN", "", "d"], "aENd", "aENd", None, None),
        (["\n\n"], ["a\n", "\nb"], "a", "a\n\n", 2, "\n\n"),
        (["aab"], ["aa", "ab"], "a", "aaab", 2, "aab"),
        (["bc", "abcd"], ["ab", "cd"], "a", "abc", 2, "bc"),
        (["c", "abc"], ["ab", "c"], "", "abc", 2, "abc"),
        (["abc", "c"], ["xxc"], "xx", "xxc", 1, "c"),
        (["b", "a"], ["xab"], "x", "xa", 1, "a"),
        ([], ["any", "thing"], "anything", "anything", None, None),
    ],
)
def test_matches(
    stop: list[str], deltas: list[str], excluded: str, included: str, num_kept: int | None, reason: str | None
) -> None:
    assert run(StopStringMatcher(stop, include_stop_str=False), deltas) == (excluded, num_kept, reason)
    assert run(StopStringMatcher(stop, include_stop_str=True), deltas) == (included, num_kept, reason)


def test_possible_beginnings_are_held_back() -> None:
    matcher = StopStringMatcher(["END"], include_stop_str=False)
    assert [matcher.feed([delta]).text for delta in ("a", " E", "N", "E", "ND")] == ["a", " ", "", "EN", ""]
    assert matcher.matched
    held = StopStringMatcher(["END"], include_stop_str=False)
    assert held.feed(["xEN"]).text == "x"
    assert held.flush() == "EN"
    assert held.flush() == ""


def test_matches_completed_within_min_tokens_are_text() -> None:
    matcher = StopStringMatcher(["b", "abc"], include_stop_str=False, min_tokens=2)
    assert run(matcher, ["a", "b", "x", "b"]) == ("abx", 4, "b")
    later = StopStringMatcher(["b", "abc"], include_stop_str=False, min_tokens=2)
    assert run(later, ["a", "b", "c"]) == ("", 3, "abc")


def reference(text: str, stop: list[str], *, include: bool) -> tuple[int | None, str]:
    """End of the first completed match in ``text`` and what may be shown, by looking at every character."""
    for end in range(1, len(text) + 1):
        found = [s for s in stop if text[:end].endswith(s)]
        if found:
            return end, text[:end] if include else text[: end - len(max(found, key=len))]
    return None, text


small_text = st.text(alphabet="ab-", max_size=24)
stops = st.lists(st.text(alphabet="ab-", min_size=1, max_size=5), min_size=1, max_size=4)


@given(st.lists(st.text(alphabet="ab-", max_size=5), max_size=8), stops, st.booleans())
def test_any_cut_into_tokens_gives_the_same_text(deltas: list[str], stop: list[str], include: bool) -> None:
    whole = "".join(deltas)
    end, expected = reference(whole, stop, include=include)
    matcher = StopStringMatcher(stop, include_stop_str=include)
    text, num_kept, reason = run(matcher, deltas)
    assert text == expected
    if end is None:
        assert (num_kept, reason) == (None, None)
    else:
        assert num_kept is not None
        assert len("".join(deltas[: num_kept - 1])) < end <= len("".join(deltas[:num_kept]))
        assert whole[:end].endswith(str(reason))


@given(small_text, small_text, stops)
def test_what_is_released_is_never_taken_back(first: str, second: str, stop: list[str]) -> None:
    """Text shown after ``first`` begins whatever is shown in the end, and no more than needed is held back."""
    matcher = StopStringMatcher(stop, include_stop_str=False)
    result = matcher.feed([first])
    if result.num_kept is not None:
        return
    shown = result.text
    assert reference(first + second, stop, include=False)[1].startswith(shown)
    held = first[len(shown) :]
    assert held == "" or any(s.startswith(held) and s != held for s in stop)
