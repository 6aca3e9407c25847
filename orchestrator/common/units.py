"""Formats counts for people and times for JSON, and recognizes ids and days."""

from __future__ import annotations

from datetime import UTC, date, datetime
from typing import Final

_YEARS: Final = range(1970, 3000)  # a period around them fits every time zone


def iso(time: datetime | None) -> str | None:
    """`2026-01-01T00:00:03Z`; with milliseconds if the time has any."""
    if time is None:
        return None
    utc = time.astimezone(UTC)
    spec = "milliseconds" if utc.microsecond >= 1000 else "seconds"
    return utc.isoformat(timespec=spec).removesuffix("+00:00") + "Z"


def is_id(text: object) -> bool:
    """Whether this can be a row's id: digits only, within 64 bits."""
    digits = str(text)
    return digits.isascii() and digits.isdecimal() and len(digits) < 19


def day_of(text: str) -> date:
    """The day of `2026-01-31`. Raises ValueError, also for years far away."""
    day = date.fromisoformat(text)
    if day.year not in _YEARS:
        raise ValueError(f"{day} is not from {_YEARS.start} to {_YEARS.stop - 1}")
    return day


def count(number: int, noun: str) -> str:
    """`1 device`, `3 devices`."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def csv_text(text: str) -> str:
    """The text of a CSV cell that no spreadsheet runs as a formula, before quoting."""
    return f"'{text}" if text.lstrip().startswith(("=", "@", "+", "-")) else text
