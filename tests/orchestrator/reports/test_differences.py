"""Comparison and merge of texts by line."""

from __future__ import annotations

import pytest

from orchestrator.reports.differences import changed_lines, difference, merged, unified

BASE = "a\nb\nc\nd\ne\nf\ng\nh\ni"


def test_changed_lines_have_context_and_gaps() -> None:
    rows = difference(BASE, BASE.replace("h", "H\nH2"), context=1)
    assert [(row.kind, row.text, row.old, row.new) for row in rows] == [
        ("gap", "", None, None),
        ("equal", "g", 7, 7),
        ("removed", "h", 8, None),
        ("added", "H", None, 8),
        ("added", "H2", None, 9),
        ("equal", "i", 9, 10),
    ]
    assert difference(BASE, BASE) == []
    assert changed_lines(BASE, BASE.replace("h", "H\nH2")) == (2, 1)
    assert unified("a", "b", "old", "new") == "--- old\n+++ new\n@@ -1 +1 @@\n-a\n+b\n"


@pytest.mark.parametrize(
    ("first", "second", "both"),
    [
        ("A\nb\nc\nd", "a\nb\nc\nD", "A\nb\nc\nD"),
        ("a\nb\nc\nd\ne", "z\na\nb\nc\nd", "z\na\nb\nc\nd\ne"),
        ("b\nc\nd", "a\nb\nc", "b\nc"),
        ("A\nb\nc\nd", "A\nb\nc\nd", "A\nb\nc\nd"),  # the same change
        ("A\nb\nc\nd", "B\nb\nc\nd", None),
        ("A\nb\nc\nd", "a\nB\nc\nd", None),  # neighbors
        ("a\nb\nc\nd\ne", "a\nb\nc\nd\nf", None),  # the same place
    ],
)
def test_changes_in_different_places_merge(first: str, second: str, both: str | None) -> None:
    assert merged("a\nb\nc\nd", first, second) == both
    assert merged("a\nb\nc\nd", second, first) == both
