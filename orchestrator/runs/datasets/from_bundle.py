"""Finds the data sets of a bundle on this installation: by fingerprint here, or in its store."""

from __future__ import annotations

import re
from typing import Any, Final

from orchestrator.accounts.models import User
from orchestrator.common.errors import Refusal
from orchestrator.runs.datasets import registration, selectors, services
from orchestrator.runs.datasets.models import DataSetVersion
from orchestrator.runs.datasets.references import references, replaced
from workers.contracts import Problem
from workers.contracts.base import as_sentences
from workers.contracts.wire.maintenance.data_sets import data_key

_FINGERPRINT: Final = re.compile(r"[0-9a-f]{64}")


def with_data_sets_of_bundle(spec: dict[str, Any], facts: Any, *, by: User) -> dict[str, Any]:
    """The spec with this installation's names of the bundle's data sets.

    `facts` is `{name@version: {fingerprint, folder, format}}`. What only the store has is
    registered. Raises 422 for a data set that is neither here nor there.
    """
    known = facts if isinstance(facts, dict) else {}
    problems = []
    for each in list(references(spec)):
        label, about = each.label, known.get(each.label)
        facts_of = each.data or (about if isinstance(about, dict) else {})
        fingerprint = str(facts_of.get("fingerprint"))
        row = _here(fingerprint, label, by)
        try:
            if row is None:
                row = _from_store(fingerprint, label, about if isinstance(about, dict) else {}, by)
        except OSError as error:
            message = f"the store cannot be read: {error}"
            problems.append(_problem(each.place, message, "Check the store."))
            continue
        if row is None:
            message = f"no data set here has the files of {label} ({fingerprint[:12]})"
            hint = "Register the original files, or configure the store that has them."
            problems.append(_problem(each.place, message, hint))
            continue
        if each.data is not None:
            each.data["dataset"] = row.label
        else:
            spec = replaced(spec, each.field.split("."), label, row.label)
    if problems:
        detail = as_sentences(problems)
        raise Refusal("spec-invalid", "The run cannot be submitted as it is", 422, detail, problems)
    return spec


def _here(fingerprint: str, label: str, by: User) -> DataSetVersion | None:
    """A usable version with these files, if possible of the same name."""
    rows = selectors.data_sets_visible_to(user=by).filter(fingerprint=fingerprint, deleted=None)
    usable = [row for row in rows if row.usable]
    same = [row for row in usable if row.label == label or row.name == label.partition("@")[0]]
    return next(iter([*same, *usable]), None)


def _from_store(
    fingerprint: str, label: str, about: dict[str, Any], by: User
) -> DataSetVersion | None:
    """Register the copy in the store. Raises OSError if the store does not answer."""
    if not _FINGERPRINT.fullmatch(fingerprint):
        return None
    if DataSetVersion.objects.filter(fingerprint=fingerprint).exists():
        return None  # of users outside the submitter's teams, or deleted
    index = registration.find_copy(fingerprint)
    if index is None or index.fingerprint != fingerprint:
        return None
    return services.data_set_import(
        by=by,
        name=label.partition("@")[0],
        format=str(about.get("format") or ""),
        folder=bool(about.get("folder")) or len(index.files) > 1,
        notes="From a bundle.",
        files={name: file.to_dict() for name, file in index.files.items()},
        key=data_key(fingerprint),
    )


def _problem(field: str, message: str, hint: str) -> Problem:
    return Problem(field=field, message=message, hint=hint)
