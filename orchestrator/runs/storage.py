"""What runs left on nodes: pinned checkpoints, deletions in progress, folders found by scans.

Does not decide what is deleted; `jobs.garbage` does.
"""

from __future__ import annotations

from collections.abc import Iterable
from datetime import timedelta
from typing import Any

from django.db import transaction
from django.db.models import Q, QuerySet

from orchestrator.accounts import services as accounts
from orchestrator.accounts.models import User
from orchestrator.accounts.roles import Role
from orchestrator.common import clock, conditional
from orchestrator.common.errors import invalid
from orchestrator.common.units import is_id
from orchestrator.runs.lifecycle.actions import require_manage
from orchestrator.runs.models import Checkpoint, Deletion, Run, StoredFolder
from orchestrator.runs.store import readers
from workers.contracts.wire.maintenance.storage import StorageReport

REPEAT = timedelta(minutes=10)  # an order without an answer


def checkpoint_pin(*, run: Run, step: int, by: User, pinned: bool = True) -> Checkpoint:
    """Protect the checkpoint of this step from garbage collection, or no longer.

    Raises 403, and 422 without a retained checkpoint of this step.
    """
    require_manage(run, by)
    rows = Checkpoint.objects.filter(run=run, step=step, deleted=None)
    with transaction.atomic():
        readers.lock([run.pk])
        if not rows.update(pinned=pinned):
            raise invalid("step", f"there is no retained checkpoint of step {step}")
        accounts.audit(
            actor=by,
            action="checkpoint.pin" if pinned else "checkpoint.unpin",
            target=f"run:{run.pk}",
            data={"step": step},
        )
    return rows.order_by("-id")[0]


def checkpoint_collect(*, checkpoint: Checkpoint, nodes: Iterable[str]) -> int:
    """Mark it as deleted and create a deletion per node; 0 if it was pinned or used meanwhile.

    Its run must be locked.
    """
    with transaction.atomic():
        free = Checkpoint.objects.filter(pk=checkpoint.pk, deleted=None, pinned=False)
        forks = Run.objects.filter(forked_from=checkpoint.run_id, ended=None, attempt_number=0)
        if forks.exists() or not conditional.update(free, deleted=clock.now()):
            return 0
        return deletions_create(
            run=checkpoint.run_id, kind="checkpoint", paths=[checkpoint.path], nodes=nodes
        )


def deletions_create(*, run: int, kind: str, paths: Iterable[str], nodes: Iterable[str]) -> int:
    """Create the deletions that do not exist; returns how many."""
    wanted = [(node, path) for node in sorted(set(nodes)) for path in paths]
    known = set(
        Deletion.objects.filter(
            run=run, done=None, path__in={path for _, path in wanted}
        ).values_list("node", "path")
    )
    new = [
        Deletion(run=run, kind=kind, node=node, path=path, created=clock.now())
        for node, path in wanted
        if (node, path) not in known
    ]
    return len(Deletion.objects.bulk_create(new, ignore_conflicts=True))


def deletions_due(*, node: str, most: int, owner: int | None = None) -> list[Deletion]:
    """Claim deletions of a node whose order is due; with `owner` of this user's runs only."""
    now = clock.now()
    rows = Deletion.objects.filter(Q(ordered=None) | Q(ordered__lt=now - REPEAT), node=node)
    if owner is not None:
        rows = rows.filter(run__in=Run.objects.filter(owner=owner).values("pk"))
    due = list(rows.filter(done=None).order_by("pk")[:most])
    Deletion.objects.filter(pk__in=[row.pk for row in due]).update(ordered=now)
    return due


def storage_report(*, node: str, report: StorageReport) -> None:
    """Apply a node's report: bytes freed, and the folders on its disk. Idempotent."""
    now = clock.now()
    for item in report.collected:
        rows = Deletion.objects.filter(node=node, path=item.path, done=None)
        if item.problem:
            rows.update(problem=item.problem)
        else:
            rows.update(done=now, freed=item.bytes, problem="")
    if report.runs is None:
        return
    with transaction.atomic():
        if report.first:
            StoredFolder.objects.filter(node=node).delete()
        ids = {int(item.name) for item in report.runs if is_id(item.name)}
        known = set(Run.objects.filter(pk__in=ids).values_list("pk", flat=True))
        StoredFolder.objects.bulk_create(
            (
                StoredFolder(
                    node=node,
                    name=item.name,
                    orphan=not (is_id(item.name) and int(item.name) in known),
                    bytes=item.bytes,
                    attempts=item.attempts,
                    modified=clock.from_unix(item.modified),
                    seen=now,
                )
                for item in report.runs
            ),
            ignore_conflicts=True,
        )


def deletions(*, user: User) -> QuerySet[Deletion]:
    """Deletions on nodes, newest first. Raises 403 below operator."""
    accounts.require_role(user, Role.OPERATOR, "see storage")
    return Deletion.objects.order_by("-id")


def folders(*, user: User, orphan: bool | None = None) -> QuerySet[StoredFolder]:
    """Run folders on nodes, by the newest scan. Raises 403 below operator."""
    accounts.require_role(user, Role.OPERATOR, "see storage")
    rows = StoredFolder.objects.order_by("id")
    return rows if orphan is None else rows.filter(orphan=orphan)


def serialize_deletion(row: Deletion) -> dict[str, Any]:
    """The REST representation of a deletion."""
    return {
        "id": str(row.pk),
        "node": row.node,
        "run": str(row.run),
        "kind": row.kind,
        "path": row.path,
        "created": row.created,
        "done": row.done,
        "freed": row.freed,
        "problem": row.problem,
    }
