"""Reads data sets with the runs that made and used them, limited to what the user may see."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from typing import Any, Final

from django.db.models import Count, OuterRef, Q, QuerySet, Subquery
from django.db.models.functions import Coalesce

from orchestrator.accounts import selectors as people
from orchestrator.accounts.models import User
from orchestrator.common.errors import missing_object
from orchestrator.common.units import iso
from orchestrator.runs.datasets.models import DataSetUse, DataSetVersion
from orchestrator.runs.models import Run
from orchestrator.runs.states import ENDED

MOST_USERS: Final = 200  # runs listed per version


def data_sets_visible_to(*, user: User | None) -> QuerySet[DataSetVersion]:
    """Versions that the user may see, deleted ones too, newest first; None: all, for a command."""
    rows = DataSetVersion.objects.select_related("owner", "run").order_by("-id")
    owners = people.visible_owners(user) if user is not None else None
    return rows if owners is None else rows.filter(Q(shared=True) | Q(owner_id__in=owners))


def newest_of_each(*, user: User, q: str = "") -> QuerySet[DataSetVersion]:
    """The newest version of each name that is not deleted, newest first.

    With `versions` of the name and the number of runs, `run_count`, that use any of them.
    """
    remaining = data_sets_visible_to(user=user).filter(deleted=None)
    same = remaining.filter(name=OuterRef("name")).order_by()
    runs = DataSetUse.objects.filter(data_set__name=OuterRef("name")).order_by()
    rows = remaining.filter(pk=Subquery(same.order_by("-version").values("pk")[:1])).annotate(
        versions=Subquery(same.values("name").annotate(n=Count("pk")).values("n")),
        run_count=Coalesce(
            Subquery(
                runs.values("data_set__name").annotate(n=Count("run", distinct=True)).values("n")
            ),
            0,
        ),
    )
    return rows.filter(name__icontains=q) if q else rows


def versions_of(*, user: User, name: str) -> list[DataSetVersion]:
    """The versions of a name, newest first. Raises 404."""
    rows = list(data_sets_visible_to(user=user).filter(name=name).order_by("-version"))
    if not rows:
        raise missing_object("data set", name)
    return rows


def version_get(*, user: User, name: str, version: int) -> DataSetVersion:
    """One version. Raises 404."""
    row = data_sets_visible_to(user=user).filter(name=name, version=version).first()
    if row is None:
        raise missing_object("data set", f"{name}@{version}")
    return row


def users_of(*, row: DataSetVersion, user: User) -> list[Run]:
    """The visible runs that use a version, newest first."""
    runs = Run.objects.filter(data_set_uses__data_set=row).select_related("owner").distinct()
    owners = people.visible_owners(user)
    if owners is not None:
        runs = runs.filter(owner_id__in=owners)
    return list(runs.order_by("-id")[:MOST_USERS])


def source_of(*, row: DataSetVersion, user: User) -> Run | None:
    """The run that wrote a version's files, if the user may see it."""
    owners = people.visible_owners(user)
    if row.run is None or (owners is not None and row.run.owner_id not in owners):
        return None
    return row.run


def unfinished_uses(row: DataSetVersion) -> QuerySet[DataSetUse]:
    """Uses by runs that have not ended."""
    return DataSetUse.objects.filter(data_set=row).exclude(run__state__in=ENDED)


def used_by(*, run: Run) -> list[DataSetUse]:
    """The data sets that a run uses."""
    rows = DataSetUse.objects.filter(run=run).select_related("data_set")
    return list(rows.order_by("use", "pk"))


def suggestion(name: str, known: Iterable[str]) -> str:
    """A hint with the known name that is most like `name`."""
    names = list(known)
    close = difflib.get_close_matches(name, names, 1, 0.5)
    if close:
        return f"Use {close[0]}."
    return f"Use one of {', '.join(sorted(names)[:5])}." if names else "Register it first."


def serialize(row: DataSetVersion) -> dict[str, Any]:
    """The REST representation of a version, without its files."""
    return {
        "name": row.name,
        "version": row.version,
        "label": row.label,
        "owner": row.owner.username,
        "path": row.path,
        "folder": row.folder,
        "format": row.format,
        "notes": row.notes,
        "state": row.state,
        "problem": row.problem,
        "hint": row.hint,
        "fingerprint": row.fingerprint,
        "bytes": row.bytes,
        "file_count": len(row.files),
        "key": row.key,
        "run": str(row.run_id) if row.run_id is not None else None,
        "created": iso(row.created),
        "deleted": iso(row.deleted),
        "removed": iso(row.removed),
    }


def serialize_newest(row: Any) -> dict[str, Any]:
    """As `serialize`, of a row of `newest_of_each`."""
    return serialize(row) | {"versions": row.versions, "run_count": row.run_count}


def serialize_details(row: DataSetVersion, *, user: User) -> dict[str, Any]:
    """As `serialize`, with the files, the run that wrote them and the runs that use them."""
    source = source_of(row=row, user=user)
    return serialize(row) | {
        "run": str(source.pk) if source is not None else None,
        "files": row.files,
        "used_by": [
            {"id": str(run.pk), "name": run.name, "kind": run.kind, "state": run.state}
            for run in users_of(row=row, user=user)
        ],
    }
