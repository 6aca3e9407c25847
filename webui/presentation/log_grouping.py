"""Equal log lines of several ranks as one, and the level a line speaks with. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Final

LEVELS: Final = ("debug", "info", "warning", "error")
WINDOW: Final = 200  # lines back that an equal one of another rank may lie
WIDTH: Final = 400  # characters shown of a line

_ERROR = re.compile(
    r"\b(error|exception|traceback|fatal|critical|out of "
    r"memory|sigkill|sigsegv|aborted)\b|\w+(Error|Exception)\b",
    re.I,
)
_WARNING = re.compile(r"\b(warn|warning|deprecat\w+)\b|\w+Warning\b", re.I)
_NAMED = re.compile(r"[\w.]*(Error|Exception|Interrupt)\b.*:|.*out of memory", re.I)
_DEBUG = re.compile(r"\b(debug|trace)\b", re.I)
_TIMESTAMP = re.compile(r"^\W*(\d{4}-\d\d-\d\d[T ])?\d\d:\d\d:\d\d([.,]\d+)?Z?\W*")
_PREFIX = re.compile(r"^\[(rank)?\d+\]:?\s?")  # the page names the ranks itself
_RANK = re.compile(r"\brank[ =:]?\d+|\[\d+\]", re.I)


@dataclass(slots=True)
class Folded:
    """A line and the ranks that wrote it; `text` is the first one's."""

    attempt: int
    ranks: list[int]
    seq: int
    time: datetime
    text: str
    level: str

    @property
    def who(self) -> str:
        """0, or 0–3, or 0, 2, or "supervisor"."""
        return ranks_words(self.ranks)


def fold(lines: Iterable[Any]) -> list[Folded]:
    """Lines in order; one that another rank wrote too within the last `WINDOW` is joined, clocks
    and ranks aside.
    """
    made: list[Folded] = []
    open_: dict[tuple[int, str], Folded] = {}
    for line in lines:
        key = (line.attempt, plain(line.text))
        before = open_.get(key)
        if (
            before is not None
            and line.rank not in before.ranks
            and line.rank >= 0
            and before.ranks[0] >= 0
        ):
            before.ranks.append(line.rank)
            continue
        found = Folded(
            line.attempt,
            [line.rank],
            line.seq,
            line.time,
            _PREFIX.sub("", line.text)[:WIDTH],
            level(line.text),
        )
        made.append(found)
        open_[key] = found
        if len(open_) > WINDOW:
            del open_[next(iter(open_))]
    return made


def level(text: str) -> str:
    head = text[:WIDTH]
    return (
        "error"
        if _ERROR.search(head)
        else "warning"
        if _WARNING.search(head)
        else "debug"
        if _DEBUG.search(head)
        else "info"
    )


def plain(text: str) -> str:
    """The line without what differs between ranks that say the same: its clock and their number."""
    return _RANK.sub("rank", _TIMESTAMP.sub("", text))


def ranks_words(ranks: Iterable[int]) -> str:
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


def first_cause(lines: Iterable[Folded]) -> Folded | None:
    """The first line that names an exception, else the first error: what to read before its echoes
    elsewhere.
    """
    errors = [line for line in lines if line.level == "error"]
    return next((line for line in errors if _NAMED.match(line.text)), errors[0] if errors else None)
