"""The conditional UPDATE: who finds the row in the expected state moves it, everybody else learns
that they lost.
"""

from __future__ import annotations

from typing import Any

from django.db.models import QuerySet


def move(queryset: QuerySet[Any], **values: Any) -> bool:
    """Sets `values` on the row that the queryset's conditions still describe; the row count says
    who won.
    """
    return queryset.update(**values) > 0
