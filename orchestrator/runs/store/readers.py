"""Runs whose specs read files of other runs, and the lock under which these files are deleted.

Submissions and garbage collection lock the run whose files they are about. The second of two sees
what the first did: no run is queued for files that are gone, and none loses its files. Specs name
files as `runs/ID/…`.
"""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping
from datetime import datetime, timedelta
from typing import Any, Final

from django.db.models import TextField
from django.db.models.functions import Cast

from orchestrator.common.errors import conflict
from orchestrator.runs.datasets.models import DataSetVersion
from orchestrator.runs.models import Checkpoint, Deletion, Run, StoredCopy

_REFERENCE: Final = re.compile(r"runs/(\d{1,18})(?:/([\w./-]*))?")
_MARGIN: Final = timedelta(seconds=30)  # clocks differ, and a submission commits after its time


def references() -> dict[int, set[str]]:
    """`{run: paths in its folder that specs of other runs name}`; "" is the whole folder.

    Also of registered data sets, whose only files may be there.
    """
    named: dict[int, set[str]] = defaultdict(set)
    rows = _with_text(Run.objects.all()).filter(text__contains="runs/")
    for pk, text in rows.values_list("pk", "text").iterator(chunk_size=500):
        for run, paths in named_in(text).items():
            if run != pk:
                named[run] |= paths
    registered = DataSetVersion.objects.filter(deleted=None, path__contains="runs/")
    for text in registered.exclude(state=DataSetVersion.State.STORED).values_list(
        "path", flat=True
    ):
        for run, paths in named_in(text).items():
            named[run] |= paths
    return named


def named_in(document: Any) -> dict[int, set[str]]:
    """`{run: paths in its folder}` of a text or spec."""
    text = document if isinstance(document, str) else json.dumps(document)
    named: dict[int, set[str]] = defaultdict(set)
    for run, inside in _REFERENCE.findall(text):
        named[int(run)].add(inside.strip("/"))
    return named


def is_named(path: str, run: int, names: set[str]) -> bool:
    """Whether one of the names is this path of the run, above it or in it."""
    inside = _inside(path, run)
    return any(
        not name or inside == name or inside.startswith(f"{name}/") or name.startswith(inside)
        for name in names
    )


def lock(runs: Iterable[int]) -> None:
    """Lock these runs until the transaction ends, in one order, so that nothing deadlocks."""
    rows = Run.objects.select_for_update(no_key=True).filter(pk__in=sorted(runs))
    list(rows.order_by("pk").values_list("pk"))


def is_unread(run: Run, *, since: datetime, path: str = "") -> bool:
    """Lock the run; whether its files are as unused as at `since`, when they were selected.

    `run` is as it was read then. False if it was queued again or forked, or if a new run or data
    set names the path, which by default is the run's folder.
    """
    rows = Run.objects.select_for_update(no_key=True).filter(pk=run.pk)
    if rows.values_list("state", "rewinds").first() != (run.state, run.rewinds):
        return False
    new = Run.objects.filter(created__gte=since - _MARGIN).exclude(pk=run.pk)
    if new.filter(forked_from=run.pk).exists():
        return False
    data = DataSetVersion.objects.filter(created__gte=since - _MARGIN)
    texts = [
        *_with_text(new).filter(text__contains=f"runs/{run.pk}").values_list("text", flat=True),
        *data.filter(path__contains=f"runs/{run.pk}").values_list("path", flat=True),
    ]
    names = [named_in(text).get(run.pk, set()) for text in texts]
    return not any(named and (not path or is_named(path, run.pk, named)) for named in names)


def require_retained(named: Mapping[int, set[str]], *, since: datetime) -> None:
    """Raises 409, which may be retried, if files with these names were deleted about `since` or
    later; the runs must be locked.

    Of a name that is a folder with several checkpoints, the newest stays in any case. A deleted
    copy in the store does not count while its checkpoint is retained.
    """
    recent = since - _MARGIN
    for run, names in named.items():
        retained = Checkpoint.objects.filter(run=run, deleted=None)
        paths = [_inside(path, run) for path in retained.values_list("path", flat=True)]
        copies = StoredCopy.objects.filter(run=run, deleted__gte=recent)
        deleted = [
            *Checkpoint.objects.filter(run=run, deleted__gte=recent).values_list("path", flat=True),
            *(
                key
                for key in copies.values_list("key", flat=True)
                if _inside(key, run).rpartition("-")[0] not in paths  # without its fingerprint
            ),
            *Deletion.objects.filter(run=run, created__gte=recent).values_list("path", flat=True),
        ]
        for path in deleted:
            inside = _inside(path, run)
            if any(name == inside or name.startswith(f"{inside}/") for name in names):
                raise conflict(
                    f"{path} was deleted a moment ago. Choose other files, or submit the run again "
                    "in a minute if the files exist again.",
                    type="files-deleted",
                    retry=True,
                )


def _inside(path: str, run: int) -> str:
    return path.removeprefix(f"runs/{run}").strip("/")


def _with_text(rows: Any) -> Any:
    return rows.annotate(text=Cast("spec", TextField()))
