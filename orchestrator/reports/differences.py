"""Compares two texts line by line, for versions and conflicts. Pure."""

from __future__ import annotations

import difflib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

_CONTEXT: Final = 3  # equal lines around a change
_LONG: Final = 400  # lines
_MOST_LINES: Final = 4000  # beyond, comparing takes seconds


@dataclass(frozen=True, slots=True)
class DiffLine:
    """A line of a comparison; `old` and `new` are its line numbers there, from 1."""

    kind: str  # equal, removed, added, or gap: equal lines that are not listed
    text: str
    old: int | None = None
    new: int | None = None


def difference(old: str, new: str, *, context: int = _CONTEXT) -> list[DiffLine]:
    """The changed lines with some equal ones around them; empty for equal texts."""
    before, after = old.splitlines(), new.splitlines()
    if before == after:
        return []
    if max(len(before), len(after)) > _MOST_LINES:
        return [
            *(DiffLine("removed", line, i) for i, line in enumerate(before, 1)),
            *(DiffLine("added", line, None, i) for i, line in enumerate(after, 1)),
        ]
    matcher = _matcher(before, after)
    rows = list[DiffLine]()
    for group in matcher.get_grouped_opcodes(context):
        first_old, first_new = group[0][1], group[0][3]
        if rows or first_old or first_new:
            rows.append(DiffLine("gap", ""))
        for tag, i, j, k, end in group:
            rows += _lines(tag, before, after, (i, j), (k, end))
    return rows


def changed_lines(old: str, new: str) -> tuple[int, int]:
    """`(added, removed)` lines."""
    rows = difference(old, new, context=0)
    return sum(row.kind == "added" for row in rows), sum(row.kind == "removed" for row in rows)


def unified(old: str, new: str, old_name: str, new_name: str) -> str:
    """The comparison in the unified format."""
    lines = difflib.unified_diff(
        old.splitlines(), new.splitlines(), old_name, new_name, lineterm="", n=_CONTEXT
    )
    return "".join(f"{line}\n" for line in lines)


def merged(base: str, first: str, second: str) -> str | None:
    """The base with the changes of both; None if they change the same or neighboring lines."""
    lines = base.splitlines()
    if max(len(text.splitlines()) for text in (base, first, second)) > _MOST_LINES:
        return None
    changes = {*_changes(lines, first), *_changes(lines, second)}
    result, at, changed_to = list[str](), 0, -1
    for start, end, new in sorted(changes):
        if start <= changed_to:
            return None
        result += [*lines[at:start], *new]
        at = changed_to = end
    return "\n".join([*result, *lines[at:]])


def _matcher(before: list[str], after: list[str]) -> difflib.SequenceMatcher[str]:
    # long texts of few different lines take seconds unless frequent lines start no match
    is_long = max(len(before), len(after)) > _LONG
    return difflib.SequenceMatcher(None, before, after, autojunk=is_long)


def _changes(base: list[str], text: str) -> Iterator[tuple[int, int, tuple[str, ...]]]:
    """`(start, end, new lines)` of each changed part of the base."""
    after = text.splitlines()
    for tag, i, j, k, end in _matcher(base, after).get_opcodes():
        if tag != "equal":
            yield i, j, tuple(after[k:end])


def _lines(
    tag: str, before: list[str], after: list[str], old: tuple[int, int], new: tuple[int, int]
) -> Iterator[DiffLine]:
    if tag == "equal":
        for i, k in zip(range(*old), range(*new), strict=True):
            yield DiffLine("equal", before[i], i + 1, k + 1)
        return
    for i in range(*old):
        yield DiffLine("removed", before[i], i + 1)
    for k in range(*new):
        yield DiffLine("added", after[k], None, k + 1)
