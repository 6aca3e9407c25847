"""The current time, read in one place so tests can freeze it."""

from __future__ import annotations

from datetime import UTC, datetime

from django.utils import timezone


def now() -> datetime:
    """The current time: aware, UTC."""
    return timezone.now()


def from_unix(seconds: float) -> datetime:
    """The aware UTC time of a Unix timestamp."""
    return datetime.fromtimestamp(seconds, UTC)
