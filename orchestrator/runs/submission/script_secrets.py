"""Secret variables of a script: encrypted in the database, references in specs, values for nodes.

A spec never has a value after the submit: `script.secrets` then says in which run each is stored.
A reference in a submitted spec (of a clone or fork) copies the value, for the owner of that run
only. Does not depend on how the values reach the nodes.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any, Final

from orchestrator.accounts.models import User
from orchestrator.common import secret_text
from orchestrator.runs.models import Run, RunSecret
from workers.contracts import Problem
from workers.contracts.catalog.secret_names import is_secret_name

PURPOSE: Final = "script secret"
_REFERENCE = re.compile(r"stored in run ([0-9]{1,18})")


def reference(run_id: int) -> str:
    """What a spec shows in place of a value that is stored with this run."""
    return f"stored in run {run_id}"


def split(spec: dict[str, Any]) -> tuple[dict[str, Any], dict[str, str]]:
    """`(spec without secret variables, values or references by name)`.

    Variables of `script.env` with a name of a secret, such as HF_TOKEN, count as secret.
    """
    script = spec.get("script")
    if not isinstance(script, dict):
        return spec, {}
    env = script.get("env") or {}
    secret = {name: text for name, text in env.items() if text and is_secret_name(name)}
    values = {**secret, **(script.get("secrets") or {})}
    rest = {name: value for name, value in script.items() if name not in ("env", "secrets")}
    if plain := {name: text for name, text in env.items() if name not in values}:
        rest["env"] = plain
    return {**spec, "script": rest}, values


def problems(spec: Mapping[str, Any], *, by: User | None) -> list[Problem]:
    """One problem per reference to a value that the submitter may not use or that is missing."""
    result = []
    for name, text in split(dict(spec))[1].items():
        source = _REFERENCE.fullmatch(text)
        if source is None:
            continue
        stored = RunSecret.objects.filter(run_id=int(source[1]), name=name)
        if by is not None:
            stored = stored.filter(run__owner=by)
        if not stored.exists():
            message = f"the value is not stored in a run of yours ({text})"
            hint = "Use the value itself; only the owner of a run can use its secrets again."
            result.append(Problem(field=f"script.secrets.{name}", message=message, hint=hint))
    return result


def store(run: Run, values: Mapping[str, str]) -> None:
    """Encrypt the values of a new run, copy referenced ones, and put references into its spec."""
    if not values:
        return
    texts = {}
    for name, text in values.items():
        source = _REFERENCE.fullmatch(text)
        if source is not None:
            text = _value(RunSecret.objects.get(run_id=int(source[1]), name=name))
        texts[name] = text
    store_values(RunSecret.objects, run.pk, texts)
    stored = dict.fromkeys(values, reference(run.pk))
    run.spec = {**run.spec, "script": {**run.spec["script"], "secrets": stored}}
    run.save(update_fields=["spec"])


def store_values(rows: Any, run_id: int, texts: Mapping[str, str]) -> None:
    """Encrypt the values into rows of this manager, which a migration may provide."""
    rows.bulk_create(
        rows.model(run_id=run_id, name=name, value=secret_text.encrypt(text, purpose=PURPOSE))
        for name, text in texts.items()
    )


def values_by_run(runs: Iterable[Run]) -> dict[int, dict[str, str] | secret_text.Unreadable]:
    """The secret variables of these runs, in one query; an error for a run with unreadable ones.

    Runs without secrets are left out.
    """
    scripts = [run.pk for run in runs if (run.spec.get("script") or {}).get("secrets")]
    result: dict[int, dict[str, str] | secret_text.Unreadable] = {}
    for row in RunSecret.objects.filter(run__in=scripts) if scripts else ():
        values = result.setdefault(row.run_id, {})
        if isinstance(values, dict):
            try:
                values[row.name] = _value(row)
            except secret_text.Unreadable as error:
                result[row.run_id] = secret_text.Unreadable(f"{row.name}: {error}")
    return result


def renew(*, dry_run: bool) -> int:
    """Encrypt values that are stored under an earlier secret key with the current one; how many."""
    changed = 0
    for row in RunSecret.objects.order_by("pk").iterator():
        try:
            value = secret_text.renewed(row.value, purpose=PURPOSE)
        except secret_text.Unreadable:
            continue
        if value is not None:
            changed += 1
            if not dry_run:
                RunSecret.objects.filter(pk=row.pk, value=row.value).update(value=value)
    return changed


def _value(row: RunSecret) -> str:
    return secret_text.decrypt(row.value, purpose=PURPOSE)
