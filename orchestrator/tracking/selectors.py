"""Reads what programs recorded about themselves, and media. Callers check permissions."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from functools import reduce
from operator import or_
from typing import Any, Final, NamedTuple

from django.db.models import Count, F, Max, Min, Q, QuerySet, Window
from django.db.models.functions import RowNumber

from orchestrator.common.errors import missing_object
from orchestrator.common.units import iso
from orchestrator.runs.models import Run
from orchestrator.tracking.details import flat
from orchestrator.tracking.models import MediaBlob, MediaItem, RunDetails

__all__ = [
    "Shown",
    "details_of",
    "details_of_runs",
    "flat",
    "media_at",
    "media_blob",
    "media_exist",
    "media_list",
    "media_names",
    "media_names_of_runs",
    "media_over_steps",
    "media_steps",
    "runs_with_media",
    "serialize_details",
    "serialize_media",
]

_SHOWN_BYTES: Final = 8_000_000  # bodies that a page loads


def details_of(*, run: Run) -> RunDetails | None:
    """What the run's program recorded about itself; None if it recorded nothing."""
    return RunDetails.objects.filter(run=run).first()


def details_of_runs(ids: Collection[int]) -> dict[int, RunDetails]:
    """`{run: details}` of the runs that have some; one query, without diffs."""
    rows = RunDetails.objects.filter(run__in=ids).defer("diff", "requirements")
    return {row.run_id: row for row in rows}


def serialize_details(details: RunDetails | None) -> dict[str, Any]:
    """The REST representation; empty values if the program recorded nothing."""
    row = details if details is not None else RunDetails()
    return {
        "config": row.config,
        "summary": row.summary,
        "program": row.program,
        "diff": row.diff,
        "requirements": row.requirements,
        "updated": iso(row.updated) if details is not None else None,
    }


def media_list(*, run: Run, name: str = "", kind: str = "", step: int | None = None) -> Any:
    """The run's media, oldest first, with their images' sizes but not their bytes."""
    rows = MediaItem.objects.filter(run=run)
    rows = rows.filter(name=name) if name else rows
    rows = rows.filter(kind=kind) if kind else rows
    rows = rows.filter(step=step) if step is not None else rows
    return rows.select_related("blob").defer("blob__data").order_by("pk")


def media_exist(*, run: Run) -> bool:
    """Whether the run has media."""
    return MediaItem.objects.filter(run=run).exists()


def media_names(*, run: Run, query: str = "") -> list[dict[str, Any]]:
    """`[{name, kind, first, last, count}]` by name; `query` is a part of the name."""
    rows: QuerySet[Any, Any] = MediaItem.objects.filter(run=run)
    rows = rows.filter(name__icontains=query) if query else rows
    return list(
        rows.values("name")
        .annotate(kind=Max("kind"), first=Min("step"), last=Max("step"), count=Count("pk"))
        .order_by("name")
    )


def media_names_of_runs(ids: Collection[int], *, kinds: Collection[str]) -> set[str]:
    """Names of the media of these kinds that the runs have; one query."""
    rows = MediaItem.objects.filter(run__in=ids, kind__in=kinds)
    return set(rows.values_list("name", flat=True).distinct())


def runs_with_media(ids: Collection[int], *, names: Collection[str], kind: str) -> set[int]:
    """The runs that have media of a kind with one of these names; one query."""
    rows = MediaItem.objects.filter(run__in=ids, name__in=names, kind=kind)
    return set(rows.order_by().values_list("run", flat=True).distinct())


def media_steps(*, run: Run, names: Collection[str] = ()) -> list[int]:
    """The steps that have media, of these names or of all, ascending."""
    rows = MediaItem.objects.filter(run=run).order_by("step")
    rows = rows.filter(name__in=names) if names else rows
    return list(rows.values_list("step", flat=True).distinct())


def media_over_steps(*, run: Run, name: str, kind: str, most: int) -> list[MediaItem]:
    """The first item of a name at each of at most `most` steps, spread evenly; ascending."""
    rows = MediaItem.objects.filter(run=run, name=name, kind=kind)
    firsts = list(rows.values("step").annotate(first=Min("index")).order_by("step"))
    if len(firsts) > most:
        last = len(firsts) - 1
        firsts = [firsts[round(place * last / (most - 1))] for place in range(most)]
    places = {(row["step"], row["first"]) for row in firsts}
    items = rows.filter(step__in=[step for step, _ in places]).order_by("step", "index")
    return [item for item in items if (item.step, item.index) in places]


class Shown(NamedTuple):
    """The first items of a name at one step, and how many there are."""

    items: list[MediaItem]
    total: int


def media_at(
    *, run: Run, names: Iterable[str], step: int | None, most: int = 12
) -> dict[str, Shown]:
    """The items of each name's newest step that is not after `step`, by index.

    At most `most` per name, and after the first of a name only as many as have 8 MB together.
    """
    names = list(names)
    rows = MediaItem.objects.filter(run=run, name__in=names)
    rows = rows.filter(step__lte=step) if step is not None else rows
    newest = dict(rows.values("name").annotate(at=Max("step")).values_list("name", "at"))
    if not newest:
        return {name: Shown([], 0) for name in names}
    wanted = reduce(or_, (Q(name=name, step=at) for name, at in newest.items()))
    places = MediaItem.objects.filter(wanted, run=run)
    counts = dict(places.values("name").annotate(count=Count("pk")).values_list("name", "count"))
    place = Window(RowNumber(), partition_by=[F("name")], order_by="index")
    first = places.annotate(place=place).filter(place__lte=most).order_by("place", "name")
    ids, size = list[int](), 0
    for pk, number, bytes_ in first.values_list("pk", "place", "bytes"):
        size += bytes_
        if number == 1 or size <= _SHOWN_BYTES:
            ids.append(pk)
    result = {name: Shown([], counts.get(name, 0)) for name in names}
    items = MediaItem.objects.filter(pk__in=ids).select_related("blob").defer("blob__data")
    for item in items.order_by("name", "index"):
        result[item.name].items.append(item)
    return result


def media_blob(*, run: Run, id: int) -> MediaBlob:
    """The bytes of an image item. Raises 404."""
    item = MediaItem.objects.filter(run=run, pk=id).select_related("blob").first()
    if item is None or item.blob is None:
        raise missing_object("image", id)
    return item.blob


def serialize_media(item: MediaItem) -> dict[str, Any]:
    """The REST representation; `data` is null for images, whose file has its own address."""
    blob = item.blob
    return {
        "id": str(item.pk),
        "run": str(item.run_id),
        "name": item.name,
        "kind": item.kind,
        "step": item.step,
        "index": item.index,
        "caption": item.caption,
        "time": item.time,
        "data": item.body,
        "image": None
        if blob is None
        else {
            "content_type": blob.content_type,
            "width": blob.width,
            "height": blob.height,
            "bytes": blob.bytes,
            "url": f"/api/v1/runs/{item.run_id}/media/{item.pk}/file?v={item.digest[:12]}",
        },
    }
