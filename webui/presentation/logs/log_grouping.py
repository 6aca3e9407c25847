"""Groups equal log lines of several ranks with the level of each line. Pure functions."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Final

from webui.presentation.logs.log_level import WIDTH, level

WINDOW: Final = 200  # how many lines back a line may be merged with an equal one

_NAMED = re.compile(r"[\w.]*(Error|Exception|Interrupt)\b.*:|.*out of memory", re.I)
_TIMESTAMP = re.compile(r"^\W*(\d{4}-\d\d-\d\d[T ])?\d\d:\d\d:\d\d([.,]\d+)?Z?\W*")
_PREFIX = re.compile(r"^\[(rank)?\d+\]:?\s?")  # the page names the ranks itself
_RANK = re.compile(r"\brank[ =:]?\d+|\[\d+\]", re.I)


@dataclass(slots=True)
class LogGroup:
    """A line and the ranks that wrote it; `text` is that of the first rank."""

    attempt: int
    ranks: list[int]
    seq: int
    time: datetime
    text: str
    level: str

    @property
    def who(self) -> str:
        """Return the ranks as "0", "0–3", "0, 2" or "supervisor"."""
        return format_ranks(self.ranks)


def group_lines(lines: Iterable[Any]) -> list[LogGroup]:
    """Merge equal lines of different ranks within the last `WINDOW`, ignoring clocks and ranks."""
    groups: list[LogGroup] = []
    open_: dict[tuple[int, str], LogGroup] = {}
    for line in lines:
        key = (line.attempt, normalize(line.text))
        before = open_.get(key)
        if (
            before is not None
            and line.rank not in before.ranks
            and line.rank >= 0
            and before.ranks[0] >= 0
        ):
            before.ranks.append(line.rank)
            continue
        group = LogGroup(
            line.attempt,
            [line.rank],
            line.seq,
            line.time,
            _PREFIX.sub("", line.text)[:WIDTH],
            level(line.text),
        )
        groups.append(group)
        open_[key] = group
        if len(open_) > WINDOW:
            del open_[next(iter(open_))]
    return groups


def normalize(text: str) -> str:
    """Remove what differs between ranks in equal lines: timestamps and rank numbers."""
    return _RANK.sub("rank", _TIMESTAMP.sub("", text))


def format_ranks(ranks: Iterable[int]) -> str:
    """Format ranks as ranges: "0–2, 7"; the launcher's lines (rank -1) as "supervisor"."""
    ordered = sorted(set(ranks))
    if ordered and ordered[0] < 0:
        return "supervisor"
    groups: list[list[int]] = []
    for rank in ordered:
        if groups and rank == groups[-1][-1] + 1:
            groups[-1].append(rank)
        else:
            groups.append([rank])
    return ", ".join(
        str(group[0]) if len(group) == 1 else f"{group[0]}–{group[-1]}" for group in groups
    )


def first_cause(lines: Iterable[LogGroup]) -> LogGroup | None:
    """Return the first line that names an exception, else the first error."""
    errors = [line for line in lines if line.level == "error"]
    return next((line for line in errors if _NAMED.match(line.text)), errors[0] if errors else None)
