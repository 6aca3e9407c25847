"""Requests, builds, lists and deletes exports. Users see only their own exports.

What the archive has is decided when it is built and again when it is downloaded: only runs that its
owner may see.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any, Final

from django.conf import settings
from django.db import DatabaseError
from django.db.models import QuerySet

from orchestrator.accounts import services as accounts
from orchestrator.accounts.models import User
from orchestrator.background_jobs.exports import archive
from orchestrator.background_jobs.models import Export
from orchestrator.common import clock, conditional
from orchestrator.common.errors import Refusal, conflict, missing_object
from orchestrator.common.units import is_id, iso
from orchestrator.runs import selectors as runs
from orchestrator.runs.models import Run

log = logging.getLogger(__name__)

MOST: Final = 10  # exports of a user at a time


def export_request(*, by: User, run: int | None = None, experiment: int | None = None) -> Export:
    """Queue an export. Raises 404 for what the user may not see, 409 beyond MOST exports."""
    if run is not None:
        kind, target = "run", runs.run_get(user=by, id=run).pk
    else:
        kind, target = "experiment", runs.experiment_get(user=by, id=experiment or 0).pk
    if Export.objects.filter(owner=by).count() >= MOST:
        raise conflict(f"You have {MOST} exports. Delete one first.", type="too-many-exports")
    now = clock.now()
    row = Export.objects.create(
        owner=by,
        kind=kind,
        target=target,
        created=now,
        expires=now + timedelta(days=settings.ENV.export_days),
    )
    accounts.audit(actor=by, action="export.create", target=f"{kind}:{target}", data={})
    return row


def exports_of(*, user: User) -> QuerySet[Export]:
    """The user's exports, newest first."""
    return Export.objects.filter(owner=user).order_by("-id")


def export_get(*, user: User, id: int | str) -> Export:
    """An export of the user. Raises 404."""
    row = exports_of(user=user).filter(pk=int(id)).first() if is_id(id) else None
    if row is None:
        raise missing_object("export", id)
    return row


def export_file(*, user: User, id: int | str) -> Path:
    """The file of a ready export. Raises 404, 409 before it is ready, or if its runs are hidden."""
    row = export_get(user=user, id=id)
    path = file_of(row)
    if row.state != Export.State.READY or not path.is_file():
        raise conflict(f"The export is {row.state}. {row.error}".strip(), type="export-not-ready")
    _target(row)  # the user may have left the team since
    return path


def export_delete(*, export: Export) -> None:
    """Delete an export with its file."""
    file_of(export).unlink(missing_ok=True)
    export.delete()


def file_of(export: Export) -> Path:
    """Where the archive is, on the machine of web and jobs."""
    return Path(settings.ENV.home) / "exports" / f"{export.pk}.zip"


def build_exports(*, dry_run: bool, renew: Callable[[], None]) -> dict[str, int]:
    """Build what is queued and delete what has expired, or count both."""
    queued = Export.objects.filter(state=Export.State.QUEUED).select_related("owner").order_by("pk")
    expired = Export.objects.filter(expires__lt=clock.now())
    if dry_run:
        return {"built": queued.count(), "expired": expired.count()}
    built = 0
    for row in queued:
        renew()
        built += _build(row, renew)
    count = 0
    for row in expired:
        export_delete(export=row)
        count += 1
    return {"built": built, "expired": count}


def _build(row: Export, renew: Callable[[], None]) -> bool:
    path = file_of(row)
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    temporary = path.with_suffix(".part")
    values: dict[str, Any] = {"state": Export.State.READY, "error": ""}
    try:
        limit = int(settings.ENV.export_mb * 10**6)
        values["bytes"] = archive.write(temporary, _target(row), limit=limit, renew=renew)
        temporary.chmod(0o600)
        temporary.replace(path)
    except DatabaseError:
        raise
    except (Refusal, archive.TooLarge, OSError) as error:
        log.warning("Export %s failed: %s", row.pk, error)
        values = {"state": Export.State.FAILED, "error": str(error)[:300]}
    finally:
        temporary.unlink(missing_ok=True)
    mine = Export.objects.filter(pk=row.pk, state=Export.State.QUEUED)
    if not conditional.update(mine, finished=clock.now(), **values):
        path.unlink(missing_ok=True)  # deleted meanwhile
        return False
    return True


def _target(row: Export) -> list[Run]:
    """The runs of the export that its owner may see. Raises 404 if there are none any more."""
    if row.kind == "run":
        return [runs.run_get(user=row.owner, id=row.target)]
    experiment = runs.experiment_get(user=row.owner, id=row.target)
    return list(runs.runs_visible_to(user=row.owner).filter(experiment=experiment).order_by("pk"))


def serialize_export(row: Export) -> dict[str, Any]:
    """The REST representation of an export."""
    return {
        "id": str(row.pk),
        "kind": row.kind,
        "target": str(row.target),
        "state": row.state,
        "created": iso(row.created),
        "finished": iso(row.finished),
        "expires": iso(row.expires),
        "bytes": row.bytes,
        "error": row.error,
    }
