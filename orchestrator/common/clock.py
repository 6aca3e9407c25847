"""The time, asked for in one place so that tests can stand it still."""

from __future__ import annotations

from datetime import UTC, datetime

from django.utils import timezone


def now() -> datetime:
    """Aware, UTC."""
    return timezone.now()


def from_unix(seconds: float) -> datetime:
    """The moment that many seconds after 1970, as nodes and programs tell it."""
    return datetime.fromtimestamp(seconds, UTC)
