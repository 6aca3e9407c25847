"""Reads the newest event of a type of many runs in one query."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any, Final, TypeVar

from django.db.models import F, Window
from django.db.models.functions import RowNumber
from pydantic import ValidationError

from orchestrator.runs.models import RunEvent

T = TypeVar("T")
_TRIED: Final = 4  # newest events of a run, for one that can be read


def newest_readable(
    *, run_ids: Collection[int], type: str, read: Callable[[Any], T]
) -> dict[int, T]:
    """`{run: what read returns}` for the newest event whose data is valid; one query.

    Without runs none. Of each run only the four newest events of the type are tried.
    """
    if not run_ids:
        return {}
    newest = Window(RowNumber(), partition_by=F("run_id"), order_by=F("seq").desc())
    rows = RunEvent.objects.filter(run_id__in=run_ids, type=type).annotate(place=newest)
    result: dict[int, T] = {}
    for run, data in (
        rows.filter(place__lte=_TRIED).order_by("run_id", "-seq").values_list("run_id", "data")
    ):
        if run not in result:
            try:
                result[run] = read(data)
            except ValidationError:
                continue
    return result
