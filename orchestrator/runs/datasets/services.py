"""Registers and deletes versions of data sets. The job `data-sets` reads and copies their files."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any, Final

from django.conf import settings
from django.db import IntegrityError, transaction

from orchestrator.accounts import selectors as people
from orchestrator.accounts import services as accounts
from orchestrator.accounts.models import User
from orchestrator.accounts.roles import Role, at_least
from orchestrator.common import clock, conditional
from orchestrator.common.errors import Refusal, conflict, forbidden, invalid
from orchestrator.runs import selectors as runs
from orchestrator.runs.datasets import registration, selectors
from orchestrator.runs.datasets.models import DataSetVersion
from orchestrator.runs.models import Run
from orchestrator.runs.submission.data_paths import file_problems, resolve_path
from orchestrator.runs.submission.run_paths import run_of_path
from workers.contracts.examples.formats import guess_format
from workers.contracts.specs.data import DATA_SET_NAME, SUFFIXES

OUTPUTS: Final = {"produce": "produced.jsonl", "generate": ""}  # kind of run → default output
NOTES_LENGTH: Final = 2000
FORMATS: Final = tuple(SUFFIXES)
_NAME: Final = re.compile(DATA_SET_NAME)
_TRIES: Final = 5  # versions, while other requests take them
_BEGINNING: Final = 1 << 20


def data_set_register(
    *,
    by: User,
    name: str,
    path: str | None = None,
    run: int | None = None,
    format: str | None = None,
    notes: str = "",
) -> DataSetVersion:
    """Register the next version of a name: a file or folder of the data folders, or a run's output.

    Raises 403 for viewers, 404 for a hidden run, 422 with one problem per wrong field.
    """
    accounts.require_role(by, Role.SUBMITTER, "register data sets")
    name = name.strip()
    _check_name(name, by)
    if len(notes) > NOTES_LENGTH:
        raise invalid(
            "notes", f"notes have at most {NOTES_LENGTH} characters", "Use shorter notes."
        )
    if (path is None) == (run is None):
        raise invalid(
            "path", "a data set is a path or the output of a run", "Use one of path and run."
        )
    place, source = _of_run(by, run) if run is not None else _of_path(by, str(path))
    chosen = format or _format_of(place)
    if chosen not in FORMATS:
        raise invalid("format", f"{chosen} is not a format", f"Use one of {', '.join(FORMATS)}.")
    roots = [Path(os.path.realpath(root)) for root in settings.DATA_ROOTS]
    shared = any(place.is_relative_to(root) for root in roots)
    allowed = settings.DATA_ROOTS if shared else [settings.ENV.media_runs]
    if problems := file_problems("path", str(place), chosen, allowed):
        raise Refusal("invalid", "The data set is not valid", 422, str(problems[0]), problems)
    row = DataSetVersion(
        name=name,
        owner=by,
        shared=shared,
        path=str(place),
        folder=place.is_dir(),
        format=chosen,
        notes=notes,
        run=source,
        created=clock.now(),
    )
    return _save(row, by)


def data_set_import(
    *, by: User, name: str, format: str, folder: bool, notes: str, files: dict[str, Any], key: str
) -> DataSetVersion:
    """Register what the store has, for a bundle of another installation; it has no local path.

    `files` are those of the copy's index, `key` its place. Raises 403, 422.
    """
    accounts.require_role(by, Role.SUBMITTER, "register data sets")
    try:
        _check_name(name, by)
    except Refusal:  # used by others here
        name = f"{name[:66]}-{key.rpartition('/')[2][:12]}"
        _check_name(name, by)
    fingerprint = key.rpartition("/")[2]
    place = settings.DATA_ROOTS[0] / "datasets" / fingerprint[:16]
    row = DataSetVersion(
        name=name,
        owner=by,
        path=str(place if folder else place / next(iter(files))),
        folder=folder,
        format=format if format in FORMATS else "text",
        notes=notes[:NOTES_LENGTH],
        files=files,
        fingerprint=fingerprint,
        bytes=sum(file["bytes"] for file in files.values()),
        shared=False,
        state=DataSetVersion.State.STORED,
        key=key,
        created=clock.now(),
        ready=clock.now(),
    )
    saved = _save(row, by)
    registration.confirm_copy(saved.pk, key)
    return saved


def data_set_delete(*, row: DataSetVersion, by: User) -> None:
    """Delete a version: no run may use it any more, and the store's copy is removed.

    Files at its path stay. Raises 403 for others than its owner and operators, 409 while a run that
    has not ended uses it.
    """
    accounts.require_role(by, Role.SUBMITTER, "delete data sets")
    if row.owner_id != by.pk and not at_least(by.role, Role.OPERATOR):
        raise forbidden(f"Data set {row.label} belongs to {row.owner.username}.")
    with transaction.atomic():
        DataSetVersion.objects.select_for_update().get(pk=row.pk)
        waiting = selectors.unfinished_uses(row).select_related("run")[:5]
        if listed := ", ".join(str(use.run_id) for use in waiting):
            raise conflict(
                f"Data set {row.label} is used by runs that have not ended: {listed}. Cancel them "
                "or wait.",
                type="data-set-in-use",
            )
        free = DataSetVersion.objects.filter(pk=row.pk, deleted=None)
        if not conditional.update(free, deleted=clock.now()):
            raise conflict(f"Data set {row.label} is deleted already.", type="data-set-deleted")
        accounts.audit(actor=by, action="data_set.delete", target=f"data_set:{row.label}", data={})


def _check_name(name: str, by: User) -> None:
    if not _NAME.fullmatch(name):
        raise invalid(
            "name",
            "a name has 1 to 80 letters, digits, dots, dashes and underscores",
            "Use a name such as support-chats.",
        )
    first = DataSetVersion.objects.filter(name=name).select_related("owner").first()
    owners = people.visible_owners(by)
    if first is None or owners is None or first.owner_id in owners:
        return
    raise invalid(
        "name", f"the name {name} is used by users outside your teams", "Use another name."
    )


def _of_path(by: User, path: str) -> tuple[Path, Run | None]:
    """The resolved path and, if it is a run's output, that run."""
    place, problems = resolve_path("path", path, [*settings.DATA_ROOTS, settings.ENV.media_runs])
    if place is None:
        raise Refusal("invalid", "The data set is not valid", 422, str(problems[0]), problems)
    number = run_of_path(place, settings.ENV.media_runs)
    top = Path(os.path.realpath(settings.ENV.media_runs))
    visible = runs.runs_visible_to(user=by)
    if number is not None or place.is_relative_to(top):
        match = visible.filter(pk=number).first() if number is not None else None
        if match is None:
            raise invalid(
                "path", f"{path} is in no run that you may see", "Use a file of one of your runs."
            )
        return place, match
    for kind in OUTPUTS:
        if match := visible.filter(kind=kind, **{f"spec__{kind}__output": str(place)}).first():
            return place, match
    return place, None


def _of_run(by: User, number: int | None) -> tuple[Path, Run]:
    """The file that a produce or generate run writes. Raises 404, 422."""
    run = runs.run_get(user=by, id=number or 0)
    if run.kind not in OUTPUTS:
        raise invalid(
            "run",
            f"run {run.pk} is a {run.kind} run, which writes no data",
            "Use a produce or generate run, or a path.",
        )
    output = str((run.spec.get(run.kind) or {}).get("output") or OUTPUTS[run.kind])
    place = Path(os.path.realpath(settings.ENV.media_runs / str(run.pk) / output))
    if not place.is_file():
        raise invalid(
            "run",
            f"the output of run {run.pk} is not on this machine: {place}",
            "Wait until the run has written it, or copy the file from its node to a data folder.",
        )
    return place, run


def _format_of(place: Path) -> str:
    """The format by suffix and, of JSON lines, by the first line."""
    try:
        files = sorted(place.iterdir()) if place.is_dir() else [place]
        for file in files:
            if file.suffix == ".jsonl":
                with open(file, "rb") as opened:
                    first = opened.read(_BEGINNING).partition(b"\n")[0]
                return guess_format(first) or "jsonl"
            if file.suffix in SUFFIXES["tokens"]:
                return "tokens"
    except OSError:
        pass
    return "text"


def _save(row: DataSetVersion, by: User) -> DataSetVersion:
    """Store the row as the next version; another request may take the number."""
    for attempt in range(_TRIES):
        newest = DataSetVersion.objects.filter(name=row.name).order_by("-version").first()
        row.pk, row.version = None, newest.version + 1 if newest is not None else 1
        data = {"path": row.path}
        try:
            with transaction.atomic():
                row.save(force_insert=True)
                accounts.audit(
                    actor=by, action="data_set.register", target=f"data_set:{row.label}", data=data
                )
            return row
        except IntegrityError:
            if attempt == _TRIES - 1:
                raise
    raise AssertionError("unreachable")
