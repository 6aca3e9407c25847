"""Resolves the data sets of a spec to versions, and describes them to nodes.

A resolved spec has `name@version`, and in its data the path and the fingerprint, so a later version
changes no run.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any, Final

from orchestrator.accounts.models import User
from orchestrator.common.errors import conflict
from orchestrator.runs.datasets import selectors
from orchestrator.runs.datasets.models import DataSetUse, DataSetVersion
from orchestrator.runs.datasets.references import Reference, references, replaced
from orchestrator.runs.models import Run
from workers.contracts import Problem
from workers.contracts.specs.data import DATA_SET_NAME, DATA_SET_PREFIX
from workers.contracts.wire.maintenance.data_sets import DataInput
from workers.contracts.wire.maintenance.store import StoredFile

_State = DataSetVersion.State
# changed files are compared by content up to this size; nodes compare all
_MOST_COMPARED: Final = 256 << 20
_TEXT_LABEL: Final = re.compile(rf"{DATA_SET_NAME}(@[1-9][0-9]{{0,8}})?")


def with_data_sets(
    spec: dict[str, Any], *, by: User | None
) -> tuple[dict[str, Any], list[Problem]]:
    """The spec with version, path and fingerprint of each data set, and what cannot be used.

    `by` is the submitter; None: a local command, which may use all data sets.
    """
    problems: list[Problem] = []
    changed = spec
    for each in references(spec):
        if each.data is None and not _TEXT_LABEL.fullmatch(each.label):
            message = f"{DATA_SET_PREFIX}{each.label[:80]} does not name a data set"
            hint = f"Use {DATA_SET_PREFIX}NAME or {DATA_SET_PREFIX}NAME@VERSION."
            problems.append(Problem(field=each.place, message=message, hint=hint))
            continue
        row, problem = _version(each.place, each.data or {"dataset": each.label}, by)
        if problem is not None:
            problems.append(problem)
        if row is None:
            continue
        names = each.field.split(".")
        if each.data is None:
            changed = replaced(changed, names, each.label, row.label)
            continue
        values = {"dataset": row.label, "path": row.path, "fingerprint": row.fingerprint}
        changed = _merged(changed, names[:-1], {"format": row.format, **each.data, **values})
    return changed, problems


def paths_elsewhere(spec: Mapping[str, Any]) -> frozenset[str]:
    """Paths of data sets whose registered files this machine lacks: the store has them."""
    return frozenset(
        row.path for _, row in _rows(spec) if row.state == _State.STORED and _changed(row)
    )


def paths_of_texts(spec: Mapping[str, Any]) -> dict[str, str]:
    """`{dataset:name@version: path}` of the texts of a resolved spec that name a data set."""
    return {DATA_SET_PREFIX + row.label: row.path for each, row in _rows(spec) if each.data is None}


def uses_store(run: Run) -> None:
    """Record which data sets the run uses. Raises 409 for one that was deleted meanwhile."""
    seen = set()
    for each, row in _rows(run.spec):
        if (row.pk, each.use) in seen:
            continue
        seen.add((row.pk, each.use))
        if DataSetVersion.objects.select_for_update().get(pk=row.pk).deleted is not None:
            raise conflict(f"Data set {row.label} was deleted.", type="data-set-deleted")
        DataSetUse.objects.create(run=run, data_set=row, use=each.use)


def unusable(run: Run) -> str:
    """Why the run cannot start again: one of its data sets was deleted; empty if it can."""
    gone = [row.label for _, row in _rows(run.spec) if row.deleted is not None]
    return f"Data set {gone[0]} of this run was deleted." if gone else ""


def inputs_of(run: Run) -> list[DataInput]:
    """What nodes need to have the run's data sets."""
    inputs: dict[int, DataInput] = {}
    for each, row in _rows(run.spec):
        if not each.read_by_nodes:
            continue
        known = inputs.setdefault(
            row.pk,
            DataInput(
                name=row.label,
                path=row.path,
                folder=row.folder,
                fingerprint=row.fingerprint,
                bytes=row.bytes,
                files={name: StoredFile.from_dict(file) for name, file in row.files.items()},
                key=row.key or None,
            ),
        )
        known.fields.append(each.field)
    return list(inputs.values())


def _rows(spec: Mapping[str, Any]) -> list[tuple[Reference, DataSetVersion]]:
    """The references of a resolved spec, each with its version."""
    rows = []
    for each in references(spec):
        name, _, version = each.label.partition("@")
        if version.isdecimal():
            row = DataSetVersion.objects.filter(name=name, version=int(version)).first()
            rows += [(each, row)] if row is not None else []
    return rows


def _version(
    field: str, place: dict[str, Any], by: User | None
) -> tuple[DataSetVersion | None, Problem | None]:
    """The version that a place of the spec means, or why it cannot be used."""
    name, at, number = place["dataset"].partition("@")
    visible = selectors.data_sets_visible_to(user=by)
    if at and not (number.isascii() and number.isdecimal() and len(number) < 10):
        return None, None  # the contract refuses it
    versions = list(visible.filter(name=name).order_by("-version"))
    if not versions:
        known = set(visible.filter(deleted=None).values_list("name", flat=True))
        hint = selectors.suggestion(name, known)
        return None, Problem(field=field, message=f"there is no data set {name}", hint=hint)
    remaining = [row for row in versions if row.deleted is None]
    ready = next((row.label for row in remaining if row.usable), "")
    if at:
        row = next((row for row in versions if row.version == int(number)), None)
    else:
        row = remaining[0] if remaining else versions[0]
    if row is None:
        message = f"data set {name} has no version {number}"
        return None, Problem(
            field=field, message=message, hint=f"Use {ready}." if ready else "Register it first."
        )
    other = f"use {ready}" if ready and ready != row.label else "register it again"
    if row.deleted is not None:
        return None, Problem(
            field=field, message=f"data set {row.label} was deleted", hint=_sentence(other)
        )
    if row.state == _State.WAITING:
        message = f"the files of data set {row.label} are still being read"
        return None, Problem(field=field, message=message, hint=f"Wait for it, or {other}.")
    if row.state == _State.FAILED:
        message = f"data set {row.label} cannot be used: {row.problem}"
        return None, Problem(field=field, message=message, hint=row.hint or _sentence(other))
    wanted = place.get("fingerprint")
    if isinstance(wanted, str) and wanted != row.fingerprint:
        same = visible.filter(fingerprint=wanted, deleted=None).first()
        message = f"data set {row.label} has another fingerprint than the spec"
        hint = f"Use {same.label}, which has it." if same is not None else "Omit the fingerprint."
        return None, Problem(field=field, message=message, hint=hint)
    if row.state != _State.STORED and (change := _changed(row)):
        message = f"data set {row.label} changed since it was registered: {change}"
        return None, Problem(field=field, message=message, hint="Register it again.")
    return row, None


def _sentence(text: str) -> str:
    return f"{text[0].upper()}{text[1:]}."


def _changed(row: DataSetVersion) -> str:
    """How the files on this machine differ from the registered ones; empty if they do not."""
    place = Path(row.path)
    for name, file in row.files.items():
        each = place / name if row.folder else place
        try:
            status = each.stat()
        except OSError as error:
            return f"{each}: {error.strerror}"
        if status.st_size != file["bytes"]:
            return f"{each} has {status.st_size:,} bytes instead of {file['bytes']:,}"
        later = status.st_mtime > row.created.timestamp()
        if later and status.st_size <= _MOST_COMPARED:
            digest = _digest(str(each), status.st_mtime_ns, status.st_size)
            if digest != file["sha256"]:
                return f"{each} has other content"
    if row.folder:
        for each in place.rglob("*"):
            name = each.relative_to(place).as_posix()
            if name not in row.files and each.is_file() and not each.is_symlink():
                return f"{each} is new"
    return ""


@lru_cache(maxsize=1024)
def _digest(path: str, changed_ns: int, size: int) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _merged(value: Any, names: list[str], body: dict[str, Any]) -> Any:
    """The value with `body` at the place that `names` lead to; the original stays as it is."""
    if not names:
        return body
    first, *rest = names
    if isinstance(value, list):
        return [
            _merged(each, rest, body) if number == int(first) else each
            for number, each in enumerate(value)
        ]
    return {**value, first: _merged(value[first], rest, body)}
