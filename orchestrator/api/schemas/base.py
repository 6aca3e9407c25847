"""Parts of response schemas: pages, ids and times."""

from __future__ import annotations

from datetime import datetime
from typing import Annotated, Generic, TypeVar

from django.utils import timezone
from ninja import Schema
from pydantic import BeforeValidator, WithJsonSchema

from orchestrator.common.units import iso

Item = TypeVar("Item")
Id = Annotated[str, BeforeValidator(str)]  # an integer as text
Time = Annotated[
    str,
    BeforeValidator(lambda time: iso(time) if isinstance(time, datetime) else time),
    WithJsonSchema({"type": "string", "format": "date-time"}),
]


class PageOf(Schema, Generic[Item]):
    """One page of a list; `next_cursor` is null on the last page."""

    items: list[Item]
    next_cursor: str | None = None


def aware(time: datetime | None) -> datetime | None:
    """The time with a time zone: UTC if it has none."""
    return (
        timezone.make_aware(time, timezone.get_default_timezone())
        if time and timezone.is_naive(time)
        else time
    )
