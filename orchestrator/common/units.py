"""Numbers as people read them, and times as JSON carries them."""

from __future__ import annotations

from datetime import UTC, datetime


def iso(time: datetime | None) -> str | None:
    """`2026-01-01T00:00:03Z`; fractions of a second only where there are any, in milliseconds."""
    if time is None:
        return None
    utc = time.astimezone(UTC)
    spec = "milliseconds" if utc.microsecond >= 1000 else "seconds"
    return utc.isoformat(timespec=spec).removesuffix("+00:00") + "Z"


def gib(size_bytes: float) -> str:
    """`1.5 GiB`, in powers of two."""
    return f"{size_bytes / 2**30:.1f} GiB"


def duration(seconds: float) -> str:
    """`45 s`, `3 min 20 s`, `2 h 5 min`, `3 d 4 h`: the two largest units that matter."""
    whole = round(seconds)
    if whole < 60:
        return f"{seconds:.1f} s" if 0 < seconds < 10 and seconds != whole else f"{whole} s"
    for unit, below, unit_s, below_s in (
        ("d", "h", 86400, 3600),
        ("h", "min", 3600, 60),
        ("min", "s", 60, 1),
    ):
        if whole >= unit_s:
            rest = whole % unit_s // below_s
            return f"{whole // unit_s} {unit}" + (f" {rest} {below}" if rest else "")
    raise AssertionError("a duration of a minute or more has a unit")


def is_id(text: object) -> bool:
    """Whether this can be the number of a row: digits only, and few enough for 64 bits."""
    word = str(text)
    return word.isascii() and word.isdecimal() and len(word) < 19


def count(number: int, noun: str) -> str:
    """`1 device`, `3 devices`."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"
