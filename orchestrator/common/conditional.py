"""The conditional UPDATE: of concurrent writers, exactly one changes the row."""

from __future__ import annotations

from typing import Any

from django.db.models import QuerySet


def update(queryset: QuerySet[Any], **values: Any) -> bool:
    """Set `values` on the rows that still match the queryset; False if none did."""
    return queryset.update(**values) > 0
