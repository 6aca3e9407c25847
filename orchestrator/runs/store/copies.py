"""Records what nodes copied into the store and why they could not; opens and deletes copies.

Does not decide what is deleted; `jobs.store_garbage` does.
"""

from __future__ import annotations

import contextlib
import json
import logging
from datetime import datetime
from typing import Any, BinaryIO, Final

from django.db import transaction
from django.db.models import QuerySet, Sum

from orchestrator.accounts import services as accounts
from orchestrator.accounts.models import User
from orchestrator.accounts.roles import Role
from orchestrator.common import clock, conditional
from orchestrator.runs.models import Artifact, Checkpoint, NodeStore, Run, StoredCopy
from orchestrator.runs.store import access, readers
from workers.contracts.wire.maintenance.store import INDEX, CopyIndex, CopyStored, StoreProblem

log = logging.getLogger(__name__)

EVENTS: Final = frozenset({"checkpoint_stored", "artifact_stored", "store_problem"})


def apply_event(*, run: Run, attempt: int, node: str, type: str, data: dict[str, Any]) -> None:
    """Apply a node's event about the store. Idempotent; raises ValidationError and ValueError."""
    if type == "store_problem":
        problem_recorded(node=node, run=run, problem=StoreProblem.from_dict(data))
        return
    stored = CopyStored.from_dict(data)
    if not stored.key.startswith(f"runs/{run.pk}/"):
        raise ValueError(f"the copy {stored.key} is not one of run {run.pk}")
    copy_recorded(run=run, attempt=attempt, node=node, stored=stored)


def copy_recorded(*, run: Run, attempt: int, node: str, stored: CopyStored) -> StoredCopy:
    """Record a complete copy and connect it with its checkpoint or artifact.

    A copy that garbage collection has marked before stays deleted if its objects are gone: the node
    may have found them just before they were deleted.
    """
    kind = "artifact" if stored.name is not None else "checkpoint"
    with transaction.atomic():
        known = StoredCopy.objects.select_for_update().filter(key=stored.key).first()
        before = known is not None and known.deleted is not None
        values = {
            "run": run,
            "kind": kind,
            "bytes": stored.bytes,
            "fingerprint": stored.fingerprint,
            "created": clock.now(),
            "deleted": None,
            "removed": None,
        }
        copy, _ = StoredCopy.objects.update_or_create(key=stored.key, defaults=values)
        if kind == "artifact":
            Artifact.objects.filter(run=run, name=stored.name).update(copy=copy)
        else:
            rows = Checkpoint.objects.filter(run=run, attempt=attempt, step=stored.step or 0)
            rows.update(copy=copy)
        NodeStore.objects.filter(node=node).delete()
    if before and exists(copy.key) is False:
        copy.deleted = clock.now()  # its removal is repeated
        copy.save(update_fields=["deleted"])
    return copy


def problem_recorded(*, node: str, run: Run, problem: StoreProblem) -> None:
    """Store why a node's copies wait; the next complete copy removes it."""
    values = {"run": run, "reason": problem.reason, "message": problem.message}
    row, new = NodeStore.objects.get_or_create(
        node=node, defaults={**values, "hint": problem.hint, "since": clock.now()}
    )
    if not new:
        NodeStore.objects.filter(pk=row.pk).update(**values, hint=problem.hint)


def problems() -> QuerySet[NodeStore]:
    """Nodes whose copies wait, by name."""
    return NodeStore.objects.order_by("node")


def problem_of(nodes: list[str]) -> NodeStore | None:
    """Why the copies of one of these nodes wait."""
    return NodeStore.objects.filter(node__in=nodes).order_by("since").first()


def copies(*, user: User, run: Run | None = None) -> QuerySet[StoredCopy]:
    """Copies in the store, newest first. Raises 403 below operator."""
    accounts.require_role(user, Role.OPERATOR, "see storage")
    rows = StoredCopy.objects.order_by("-id")
    return rows if run is None else rows.filter(run=run)


def of_run(*, run: Run) -> QuerySet[StoredCopy]:
    """The run's copies that may be used, newest first."""
    return StoredCopy.objects.filter(run=run, deleted=None).order_by("-id")


def totals(*, user: User) -> dict[str, int]:
    """`{copies, bytes}` of what the store has. Raises 403 below operator."""
    rows = copies(user=user).filter(deleted=None)
    return {"copies": rows.count(), "bytes": rows.aggregate(sum=Sum("bytes"))["sum"] or 0}


def check(*, user: User) -> str:
    """Why this machine cannot use the store; empty if it can. Raises 403 below operator."""
    accounts.require_role(user, Role.OPERATOR, "check the store")
    return access.problem()


def copy_collect(copy: StoredCopy, *, since: datetime) -> bool:
    """Mark a copy that was selected at `since` as deleted, so that nothing starts to use it.

    False if it was deleted before, or if its run was forked, rewound, pinned or named meanwhile.
    """
    with transaction.atomic():
        if not readers.is_unread(copy.run, since=since):
            return False
        if Checkpoint.objects.filter(copy=copy, pinned=True).exists():
            return False
        free = StoredCopy.objects.filter(pk=copy.pk, deleted=None)
        return bool(conditional.update(free, deleted=clock.now()))


def remove(copy: StoredCopy) -> None:
    """Delete the objects of a copy that is marked as deleted. Raises the store's errors.

    Nothing of a copy that was recorded again meanwhile. If it is recorded while its objects are
    deleted, it is marked again, because it is incomplete.
    """
    marked = StoredCopy.objects.filter(pk=copy.pk, deleted=copy.deleted)
    if copy.deleted is None or not marked.exists():
        return
    remove_objects(copy.key)
    if not conditional.update(marked, removed=clock.now()):
        StoredCopy.objects.filter(pk=copy.pk).update(deleted=clock.now())


def remove_objects(key: str) -> None:
    """Delete the objects of a copy, its index first. Raises the store's errors."""
    fs, root = access.open_store()
    folder = f"{root}/{key}"
    for path, recursive in ((f"{folder}/{INDEX}", False), (folder, True)):  # then it is incomplete
        with contextlib.suppress(FileNotFoundError):  # another process deletes them too
            if fs.exists(path):
                fs.rm(path, recursive=recursive)


def exists(key: str) -> bool | None:
    """Whether the store has the index of a copy and all files in it; None if it does not answer.

    An index of another release counts as no answer.
    """
    try:
        fs, root = access.open_store()
        fs.invalidate_cache()
        folder = f"{root}/{key}"
        try:
            index = CopyIndex.from_dict(json.loads(fs.cat_file(f"{folder}/{INDEX}")))
        except FileNotFoundError:
            return False
        objects = fs.find(folder, detail=True)
        sizes = {path[len(folder) + 1 :]: int(facts["size"]) for path, facts in objects.items()}
        return all(sizes.get(name) == file.bytes for name, file in index.files.items())
    except Exception:  # the libraries of stores have errors of their own
        log.warning("The store does not say whether it has %s", key, exc_info=True)
        return None


def artifact_open(artifact: Artifact) -> tuple[BinaryIO, int] | None:
    """Open an artifact's copy, with its size; None if the store has none."""
    copy = artifact.copy
    if copy is None or copy.deleted is not None or not access.configured():
        return None
    fs, root = access.open_store()
    files = [path for path in fs.find(f"{root}/{copy.key}") if not path.endswith(f"/{INDEX}")]
    if len(files) != 1:
        return None
    return fs.open(files[0], "rb"), copy.bytes


def serialize_copy(copy: StoredCopy) -> dict[str, Any]:
    """The REST representation of a copy."""
    return {
        "id": str(copy.pk),
        "run": str(copy.run_id),
        "kind": copy.kind,
        "key": copy.key,
        "bytes": copy.bytes,
        "fingerprint": copy.fingerprint,
        "created": copy.created,
        "deleted": copy.deleted,
        "removed": copy.removed,
    }
