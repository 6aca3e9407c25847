"""The checkpoints that queued runs continue from, and the nodes that store them.

One query for checkpoints, one for attempts, and one per generation of forks. Writes nothing.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from django.db.models import F

from orchestrator.runs.models import Attempt, Checkpoint, Run
from orchestrator.runs.store import access
from workers.contracts.wire.node_messages import RunState

_GENERATIONS = 100
_CHUNK = 500


class ResumePoint(NamedTuple):
    """A run's newest checkpoint on disk; `nodes` is empty if they are unknown.

    `stored` is the key of its copy in the store, from which any node can read it; empty: none.
    """

    path: str
    step: int
    nodes: frozenset[str]
    stored: str = ""

    @property
    def resume_from(self) -> dict[str, Any]:
        """`{path, step, stored?}` for an attempt."""
        place: dict[str, Any] = {"path": self.path, "step": self.step}
        return {**place, "stored": self.stored} if self.stored else place


def of_queued() -> dict[int, ResumePoint]:
    """The resume point of each queued run that has one."""
    newest: dict[int, tuple[str, int]] = {}
    stored: dict[int, str] = {}
    writers: dict[int, tuple[int, int]] = {}  # queued run → run and number of the attempt
    inherited: dict[int, int] = {}  # queued run → the ancestor to search
    rows = Checkpoint.objects.filter(run__state=RunState.QUEUED, deleted=None)
    has_store = access.configured()
    for run, path, step, attempt, parent, key, gone in rows.order_by(
        "run_id", "-step", "-id"
    ).values_list(
        "run_id",
        "path",
        "step",
        "attempt",
        "run__forked_from_id",
        "copy__key",
        "copy__deleted",
    ):
        if run in newest:
            continue
        newest[run] = path, step
        if key and gone is None and has_store:
            stored[run] = key
        if attempt or parent is None:
            writers[run] = run, attempt
        else:
            inherited[run] = parent
    _search_ancestors(newest, writers, inherited)
    placements = _placements(set(writers.values()))
    return {
        run: ResumePoint(
            path,
            step,
            placements.get(writers.get(run, (0, 0)), frozenset()),
            stored.get(run, ""),
        )
        for run, (path, step) in newest.items()
    }


def _search_ancestors(
    newest: dict[int, tuple[str, int]],
    writers: dict[int, tuple[int, int]],
    inherited: dict[int, int],
) -> None:
    for _ in range(_GENERATIONS):
        if not inherited:
            return
        saved_by: dict[tuple[int, int], int] = {}  # (ancestor, step) → attempt
        parents = sorted(set(inherited.values()))
        steps = sorted({newest[run][1] for run in inherited})
        for start in range(0, len(parents), _CHUNK):
            saved = Checkpoint.objects.filter(run_id__in=parents[start : start + _CHUNK])
            saved = saved.filter(step__in=steps) if len(steps) <= _CHUNK else saved
            # the last row of a key is the preferred one
            order = F("deleted").desc(nulls_last=True), "attempt", "id"
            for run, step, attempt in saved.order_by(*order).values_list(
                "run_id", "step", "attempt"
            ):
                saved_by[run, step] = attempt
        grandparents = dict(Run.objects.filter(pk__in=parents).values_list("pk", "forked_from_id"))
        following: dict[int, int] = {}
        for run, ancestor in inherited.items():
            number = saved_by.get((ancestor, newest[run][1]))
            above = grandparents.get(ancestor)
            if number:
                writers[run] = ancestor, number
            elif number == 0 and above is not None:
                following[run] = above
        inherited = following


def _placements(wanted: set[tuple[int, int]]) -> dict[tuple[int, int], frozenset[str]]:
    """`{(run, attempt number): node names}`."""
    runs = sorted({run for run, _ in wanted})
    nodes: dict[tuple[int, int], frozenset[str]] = {}
    for start in range(0, len(runs), _CHUNK):
        rows = Attempt.objects.filter(run_id__in=runs[start : start + _CHUNK])
        for run, number, placement in rows.values_list("run_id", "number", "placement"):
            if (run, number) in wanted:
                nodes[run, number] = frozenset(share["node"] for share in placement)
    return nodes
