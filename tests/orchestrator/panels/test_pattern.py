"""Regular expressions: the same matches as `re`, positions of errors, bounded time."""

from __future__ import annotations

import random
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from orchestrator.panels.pattern import PatternError, compiled, matches

_ATOMS = [*"ab_1", r"\.", ".", r"\d", r"\w", r"\W", "[ab]", "[^a]", "[a-b1]", r"[\d_]", "^", "$"]


def _repeated(part: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
    counts = st.sampled_from(["*", "+", "?", "{2}", "{1,2}", "{,2}", "{1,}", "*?"])
    return st.one_of(
        st.tuples(part, part).map("".join),
        st.tuples(part, part).map(lambda two: f"({two[0]}|{two[1]})"),
        st.tuples(part, counts).map(lambda two: f"(?:{two[0]}){two[1]}"),
    )


_PATTERNS = st.recursive(st.sampled_from([*_ATOMS, r"\b", r"\B"]), _repeated, max_leaves=12)
_NAMES = st.lists(st.text("abAB_1/. ", min_size=1, max_size=7), max_size=8)


@settings(max_examples=400, deadline=None)
@given(_PATTERNS, _NAMES, st.booleans())
def test_matches_are_those_of_re(pattern: str, names: list[str], ignore_case: bool) -> None:
    text = f"(?i){pattern}" if ignore_case else pattern
    assert matches(text, names) == [name for name in names if re.search(text, name)]


@pytest.mark.parametrize(
    ("pattern", "at", "message"),
    [
        ("loss(", 4, "this parenthesis is not closed"),
        ("loss)", 4, "this parenthesis closes nothing"),
        ("[a-", 0, "this bracket is not closed"),
        ("[z-a]", 1, "z-a is not a range"),
        ("*loss", 0, "'*' has nothing to repeat"),
        ("a**", 2, "a repetition is repeated"),
        ("a++", 2, "possessive repetitions are not supported"),
        ("a{3,2}", 1, "{3,2} ends below its start"),
        ("a{1000}", 1, "more than 200 repetitions"),
        (r"(a)\1", 3, "references to groups are not supported"),
        ("(?=a)", 0, "conditions on what comes before or after are not supported"),
        ("a(?<!b)", 1, "conditions on what comes before or after are not supported"),
        ("a(?i)", 1, "only (?i) is supported, at the start of the pattern"),
        (r"\q", 0, r"\q is not an escape"),
        ("a\\", 1, "a backslash at the end escapes nothing"),
        ("(" * 30, 20, "the groups are nested too deeply"),
        ("((a{100}){100}){100}", 0, "the pattern is too large"),
        ("a" * 201, 200, "the pattern has 201 characters, more than 200"),
    ],
)
def test_errors_name_their_position(pattern: str, at: int, message: str) -> None:
    with pytest.raises(PatternError) as caught:
        compiled(pattern)
    assert (caught.value.at, caught.value.message) == (at, message)


def test_patterns_that_backtrack_forever_in_re_cost_as_much_as_others() -> None:
    names = ["a" * 119 + "b"] * 5000
    pattern = compiled("^(a+)+$")
    before = pattern.work
    assert matches("^(a+)+$", names) == []
    assert pattern.work - before < 2000  # states are computed for the first name only


def test_a_pattern_that_needs_a_state_per_character_stops_at_a_limit() -> None:
    draw = random.Random(1)
    names = ["".join(draw.choice("ab") for _ in range(120)) for _ in range(20_000)]
    with pytest.raises(PatternError, match="takes too long"):
        matches("(a|b)*a(a|b){90}", names)
