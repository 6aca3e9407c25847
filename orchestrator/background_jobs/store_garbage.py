"""Which copies in the store are deleted: superseded, discarded, by age and by size; of data sets
only those of deleted versions.

Never a run's newest and best checkpoint, pinned ones, and those that a fork or another run's spec
needs. Objects are deleted after the copy is marked, index first, and again after a failure.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator
from datetime import datetime, timedelta
from typing import Final, NamedTuple

from django.conf import settings

from orchestrator.background_jobs import garbage
from orchestrator.common import clock
from orchestrator.runs.datasets import registration
from orchestrator.runs.models import Checkpoint, Run, StoredCopy
from orchestrator.runs.states import ENDED
from orchestrator.runs.store import access, copies, readers
from workers.contracts.specs.train import CheckpointSpec

_GB: Final = 10**9


class Candidate(NamedTuple):
    """A copy that a run of the job would delete."""

    run: int | None  # None: of a data set
    kind: str  # checkpoint | artifact | data
    key: str
    bytes: int  # 0 for a data set whose copy another version has too
    reason: str  # superseded | discarded | age | size | deleted
    copy: StoredCopy | None = None
    data_set: str = ""  # NAME@VERSION


def collect(*, dry_run: bool, renew: Callable[[], None]) -> dict[str, int]:
    """Delete what the policy selects, or count it; also what earlier runs could not delete."""
    counts = {"copies": 0, "bytes": 0}
    if not access.configured():
        return counts
    now = clock.now()
    for candidate in copy_candidates(now=now):
        if not dry_run:
            renew()
            assert candidate.copy is not None
            if not copies.copy_collect(candidate.copy, since=now):
                continue
        counts["copies"] += 1
        counts["bytes"] += candidate.bytes
    counts = _with_data_sets(counts, dry_run=dry_run, renew=renew)
    if dry_run:
        return counts
    for copy in StoredCopy.objects.filter(removed=None).exclude(deleted=None).order_by("pk"):
        renew()
        copies.remove(copy)
    return counts


def _with_data_sets(
    counts: dict[str, int], *, dry_run: bool, renew: Callable[[], None]
) -> dict[str, int]:
    """Also the copies of deleted data sets; others stay whatever their age."""
    removed = registration.remove_copies(dry_run=dry_run, renew=renew)
    if removed["data_sets"]:
        counts["data_sets"] = removed["data_sets"]
        counts["bytes"] += removed["bytes"]
    return counts


def candidates(*, now: datetime) -> Iterator[Candidate]:
    """What a run at this time deletes: copies of runs, then of deleted data sets."""
    yield from copy_candidates(now=now)
    for row, freed in registration.removable():
        yield Candidate(row.run_id, "data", row.key, freed, "deleted", None, row.label)


def copy_candidates(*, now: datetime) -> Iterator[Candidate]:
    """Copies of checkpoints and artifacts that a run at this time deletes."""
    env = settings.ENV
    references = readers.references()
    by_run: dict[int, list[StoredCopy]] = defaultdict(list)
    rows = StoredCopy.objects.filter(deleted=None).select_related("run")
    for row in rows.order_by("run__ended", "run_id", "pk"):
        by_run[row.run_id].append(row)
    total = sum(row.bytes for own in by_run.values() for row in own if row.run.state in ENDED)
    before = now - timedelta(days=env.gc_store_days) if env.gc_store_days else None
    most = env.gc_store_gb * _GB if env.gc_store_gb else None
    for id, own in by_run.items():  # runs that ended first come first
        run = own[0].run
        facts = _Facts(run, own, references.get(id, set()))
        old = before is not None and run.ended is not None and run.ended < before
        for row in own:
            if row.pk in facts.protected:
                continue
            too_much = most is not None and total > most and run.state in ENDED
            reason = facts.reason(row) or ("age" if old else "size" if too_much else "")
            if not reason:
                continue
            total -= row.bytes if run.state in ENDED else 0
            yield Candidate(id, row.kind, row.key, row.bytes, reason, row)


class _Facts:
    """What the checkpoints and artifacts of a run say about its copies."""

    def __init__(self, run: Run, own: list[StoredCopy], named: set[str]) -> None:
        keys = [row.pk for row in own]
        everywhere = Checkpoint.objects.filter(copy__in=keys)
        rows = [row for row in everywhere.order_by("step", "id") if row.run_id == run.pk]
        needed = garbage.protected_checkpoints(run, named, rows)
        pinned = {row.copy_id for row in rows if row.pinned}
        elsewhere = everywhere.exclude(run=run).filter(deleted=None)
        self.protected = {row.copy_id for row in rows if row.pk in needed} | pinned
        self.protected |= set(elsewhere.values_list("copy_id", flat=True))
        if named or pinned:  # its folder is used: artifacts too
            self.protected |= {row.pk for row in own if row.kind == "artifact"}
        linked = {row.copy_id for row in everywhere}
        linked |= {row.pk for row in own if row.kind == "artifact" and row.artifacts.exists()}
        self._linked = linked
        keep = CheckpointSpec.from_dict((run.spec.get("train") or {}).get("checkpoint") or {}).keep
        steps = sorted({row.step for row in rows}, reverse=True)[:keep]
        in_training = run.kind == "train"
        self._superseded = {
            row.copy_id for row in rows if in_training and row.step not in steps
        } - {row.copy_id for row in rows if row.step in steps}

    def reason(self, row: StoredCopy) -> str:
        """Why the copy goes whatever the policy says; empty if it does not."""
        if row.pk not in self._linked:
            return "discarded"
        return "superseded" if row.pk in self._superseded else ""
