"""Which checkpoints and attempt folders of ended runs are deleted from nodes, by age and size.

Never the newest and the best checkpoint of a run, pinned ones, those that another run's spec
names or a fork still needs, and nothing of runs that have not ended. Agents delete, and in the home
of an engine its jobs; see `runs.storage` and `scheduling.cluster_engines.homes`.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator
from datetime import datetime, timedelta
from typing import Final, NamedTuple

from django.conf import settings
from django.db import transaction

from orchestrator.common import clock
from orchestrator.fleet.models import Node
from orchestrator.runs import storage
from orchestrator.runs.models import Attempt, Checkpoint, Deletion, Run, StoredFolder
from orchestrator.runs.states import ENDED
from orchestrator.runs.store import readers
from orchestrator.scheduling import dispatch
from orchestrator.scheduling.cluster_engines import homes
from orchestrator.telemetry import selectors as telemetry
from workers.contracts.wire.maintenance.storage import MOST_ITEMS

_GB: Final = 10**9


class Candidate(NamedTuple):
    """A checkpoint, or an attempt's folder without its checkpoints, that a run would delete."""

    run: int
    kind: str  # checkpoint | attempt
    path: str
    bytes: int  # of a folder: on all its nodes by their newest scans, 0 before the first
    reason: str
    nodes: tuple[str, ...]
    owner: Run  # as it was when the candidate was selected
    checkpoint: Checkpoint | None = None


def collect_garbage(*, dry_run: bool, renew: Callable[[], None]) -> dict[str, int]:
    """Delete what the policy selects, or count it; sends orders that have no answer again."""
    now = clock.now()
    names = ("checkpoints", "checkpoint_bytes", "attempt_folders", "attempt_folder_bytes")
    counts = dict.fromkeys(names, 0)
    for candidate in candidates(now=now):
        if not dry_run:
            renew()
            if not _delete(candidate, since=now):
                continue
        if candidate.kind == "checkpoint":
            counts["checkpoints"] += 1
            counts["checkpoint_bytes"] += candidate.bytes
        else:
            counts["attempt_folders"] += 1
            counts["attempt_folder_bytes"] += candidate.bytes
    if not dry_run:
        counts["orders"] = _send_orders(renew)
    return counts


def candidates(*, now: datetime) -> Iterator[Candidate]:
    """What a run at this time deletes."""
    env = settings.ENV
    if not (env.gc_checkpoint_days or env.gc_checkpoint_gb or env.gc_folder_days):
        return
    named = readers.references()
    yield from _checkpoints(now, named)
    if env.gc_folder_days:
        yield from _folders(now - timedelta(days=env.gc_folder_days), named)


def _checkpoints(now: datetime, references: dict[int, set[str]]) -> Iterator[Candidate]:
    env = settings.ENV
    rows = Checkpoint.objects.filter(deleted=None, run__state__in=ENDED, pinned=False)
    by_run: dict[int, list[Checkpoint]] = defaultdict(list)
    for row in rows.select_related("run").order_by("run__ended", "run_id", "step", "id"):
        by_run[row.run_id].append(row)
    total = sum(
        Checkpoint.objects.filter(deleted=None, run__state__in=ENDED).values_list(
            "bytes", flat=True
        )
    )
    before = now - timedelta(days=env.gc_checkpoint_days) if env.gc_checkpoint_days else None
    most = env.gc_checkpoint_gb * _GB if env.gc_checkpoint_gb else None
    for id, own in by_run.items():  # runs that ended first come first
        run = own[0].run
        old = before is not None and run.ended is not None and run.ended < before
        if not old and (most is None or total <= most):
            continue
        rows_left = Checkpoint.objects.filter(run=run, deleted=None).order_by("step", "id")
        protected = protected_checkpoints(run, references.get(id, set()), list(rows_left))
        for row in own:
            too_much = most is not None and total > most
            if row.pk in protected or not (old or too_much):
                continue
            reason = "age" if old else "size"
            nodes = _nodes_of(row)
            yield Candidate(id, "checkpoint", row.path, row.bytes, reason, nodes, run, row)
            total -= row.bytes


def protected_checkpoints(run: Run, named: set[str], rows: list[Checkpoint]) -> set[int]:
    """Keys of the run's checkpoints that stay: newest, best, named by specs, needed by a fork.

    `rows`: those that exist, by step. `named`: paths in the run's folder, from `references`.
    """
    keep = {rows[-1].pk} if rows else set()
    if (best := _best(run, rows)) is not None:
        keep.add(best.pk)
    waiting = Run.objects.filter(forked_from=run, attempt_number=0, ended=None)
    steps = set(
        Checkpoint.objects.filter(run__in=waiting, attempt=0).values_list("step", flat=True)
    )
    for row in rows:
        if readers.is_named(row.path, run.pk, named) or row.step in steps:
            keep.add(row.pk)
    return keep


def _best(run: Run, rows: list[Checkpoint]) -> Checkpoint | None:
    """The checkpoint with the lowest validation loss, or loss, logged up to its step."""
    if len(rows) < 2:
        return None
    for name in ("val_loss", "loss"):
        curve = telemetry.series(run=run, name=name, points=5000)
        values = {
            row.pk: next(
                (
                    y
                    for x, y in zip(reversed(curve.x), reversed(curve.y), strict=True)
                    if x <= row.step and y == y
                ),
                None,
            )
            for row in rows
        }
        known = {key: value for key, value in values.items() if value is not None}
        if known:
            best = min(known, key=lambda key: known[key])
            return next(row for row in rows if row.pk == best)
    return None


def _folders(before: datetime, references: dict[int, set[str]]) -> Iterator[Candidate]:
    attempts = Attempt.objects.filter(run__state__in=ENDED, run__ended__lt=before).exclude(
        run__kind="external"
    )
    deleted = set(Deletion.objects.filter(kind="attempt").values_list("path", flat=True))
    pinned = set(Checkpoint.objects.filter(pinned=True).values_list("run_id", flat=True))
    columns = ("run", "run__state", "run__rewinds", "number", "placement")
    for attempt in attempts.order_by("run_id", "number").select_related("run").only(*columns):
        path = f"runs/{attempt.run_id}/attempt-{attempt.number}"
        if path in deleted or attempt.run_id in references or attempt.run_id in pinned:
            continue
        nodes = tuple(dict.fromkeys(homes.home_name(share) for share in attempt.placement))
        size = _folder_bytes(attempt, nodes)
        yield Candidate(attempt.run_id, "attempt", path, size, "age", nodes, attempt.run)


def _folder_bytes(attempt: Attempt, nodes: tuple[str, ...]) -> int:
    """Bytes of the attempt's folder on its nodes; a shared folder counts once."""
    rows = StoredFolder.objects.filter(node__in=nodes, name=str(attempt.run_id))
    sizes = [
        int(sizes.get(f"attempt-{attempt.number}", 0))
        for sizes in rows.values_list("attempts", flat=True)
    ]
    return max(sizes, default=0) if settings.ENV.shared_runs else sum(sizes)


def _nodes_of(row: Checkpoint) -> tuple[str, ...]:
    """The nodes that may store it: those of its attempt; for a fork's pin, of all attempts."""
    attempts = Attempt.objects.filter(run=row.run_id)
    if row.attempt:
        attempts = attempts.filter(number=row.attempt)
    return tuple(
        sorted(
            {
                homes.home_name(share)
                for placement in attempts.values_list("placement", flat=True)
                for share in placement
            }
        )
    )


def _delete(candidate: Candidate, *, since: datetime) -> bool:
    """False if the files were used meanwhile."""
    nodes = candidate.nodes[:1] if settings.ENV.shared_runs else candidate.nodes
    with transaction.atomic():
        path = candidate.path if candidate.checkpoint is not None else ""
        if not readers.is_unread(candidate.owner, since=since, path=path):
            return False
        if candidate.checkpoint is not None:
            return bool(storage.checkpoint_collect(checkpoint=candidate.checkpoint, nodes=nodes))
        return bool(
            storage.deletions_create(
                run=candidate.run, kind="attempt", paths=[candidate.path], nodes=nodes
            )
        )


def _send_orders(renew: Callable[[], None]) -> int:
    """Send due deletions and a scan to every node that is up; returns the number of orders."""
    sent = 0
    for node in Node.objects.filter(health=Node.Health.UP).exclude(join_token_id=""):
        renew()
        due = storage.deletions_due(node=node.name, most=MOST_ITEMS)
        sent += dispatch.collect(
            node,
            checkpoints=[row.path for row in due if row.kind == "checkpoint"],
            attempts=[row.path for row in due if row.kind == "attempt"],
        )
    return sent
