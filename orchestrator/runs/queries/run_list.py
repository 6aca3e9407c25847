"""Runs that a user may see: one by id, and lists with filters."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import datetime
from typing import Any, Required, TypedDict, Unpack

from django.db.models import Exists, OuterRef, Q, QuerySet

from orchestrator.accounts import selectors as people
from orchestrator.accounts.models import User
from orchestrator.common.compiled_query import CompiledQuery
from orchestrator.common.errors import missing_object
from orchestrator.common.units import is_id
from orchestrator.runs.models import (
    Experiment,
    Run,
    RunTag,
)
from orchestrator.runs.serializers import (
    serialize_runs,
)

_run_by_id = CompiledQuery(
    lambda id: Run.objects.select_related("owner", "experiment").filter(pk=id).order_by(), int
)


def runs_visible_to(*, user: User) -> QuerySet[Run]:
    """Runs of the user and of team members; for operators all. Selects owner and experiment."""
    runs = Run.objects.select_related("owner", "experiment")
    owners = people.visible_owners(user)
    if owners is None:
        return runs
    return filter_in(runs, "owner_id", owners)


def run_get(*, user: User, id: int | str) -> Run:
    """The run; its tags are read when they are used.

    Raises 404 if it does not exist or the user may not see it.
    """
    if is_id(id):
        owners = people.visible_owners(user)
        run = _run_by_id.first(int(id))
        if run is not None and (owners is None or run.owner_id in owners):
            return run
    raise missing_object("run", id)


class RunFilters(TypedDict, total=False):
    """What `run_list` and `run_rows` take."""

    user: Required[User]
    state: str | Iterable[str] | None
    kind: str | Iterable[str] | None
    experiment: str | int | Iterable[str] | None
    tag: str | Iterable[str] | None
    owner: str | Iterable[str] | None
    q: str | None
    before_id: int | None
    limit: int
    within: QuerySet[Run] | None


def run_list(**filters: Unpack[RunFilters]) -> list[Run]:
    """At most `limit` runs, newest first, with ids below `before_id`; prefetches tags.

    Each filter takes one value, several, or a comma-separated list. `experiment` is an id or a
    name, `owner` a username or `me`; `q` matches names, notes, models and tags. `within` is the
    result of `runs_visible_to` for this user, if the caller has it, which saves the query of their
    teams.
    """
    return list(_listed(**filters).prefetch_related("tags"))


def run_rows(**filters: Unpack[RunFilters]) -> list[dict[str, Any]]:
    """As `run_list`, in the REST representation: without objects, at half the CPU time."""
    return serialize_runs(_listed(**filters))


def runs_matching(**filters: Unpack[RunFilters]) -> QuerySet[Run]:
    """All runs that pass the filters of `run_list`, newest first; ignores `limit`."""
    chosen = dict(filters)
    chosen.pop("limit", None)
    return _listed(**chosen, limit=None)  # type: ignore[arg-type]


def runs_failed_since(
    *, user: User, since: datetime, limit: int, owner: str | None = None
) -> tuple[list[Run], int]:
    """At most `limit` visible runs that ended as failed since then, newest first; their number."""
    failed = runs_matching(user=user, state="failed", owner=owner).filter(ended__gte=since)
    return list(failed.order_by("-ended", "-id")[:limit]), failed.count()


def _listed(
    *,
    user: User,
    state: str | Iterable[str] | None = None,
    kind: str | Iterable[str] | None = None,
    experiment: str | int | Iterable[str] | None = None,
    tag: str | Iterable[str] | None = None,
    owner: str | Iterable[str] | None = None,
    q: str | None = None,
    before_id: int | None = None,
    limit: int | None = 50,
    within: QuerySet[Run] | None = None,
) -> QuerySet[Run]:
    runs = runs_visible_to(user=user) if within is None else within
    runs = filter_in(runs, "state", _split_list(state))
    runs = filter_in(runs, "kind", _split_list(kind))
    if isinstance(experiment, int):  # an id; a text may be a name that looks like one
        runs = runs.filter(experiment_id=experiment)
    elif experiments := _split_list(experiment):
        numbers = [int(text) for text in experiments if is_id(text)]
        which = Experiment.objects.filter(Q(name__in=experiments) | Q(pk__in=numbers))
        runs = filter_in(
            runs, "experiment_id", list(which.values_list("id", flat=True)), required=True
        )
    if tags := _split_list(tag):
        runs = runs.filter(Exists(RunTag.objects.filter(run=OuterRef("pk"), name__in=tags)))
    if owners := _split_list(owner):
        names = [user.username if name == "me" else name for name in owners]
        owned = User.objects.filter(username__in=names)
        runs = filter_in(runs, "owner_id", list(owned.values_list("id", flat=True)), required=True)
    if q:
        tagged = Q(pk__in=RunTag.objects.filter(name__icontains=q).values("run_id"))
        text = Q(name__icontains=q) | Q(notes__icontains=q) | Q(model_name__icontains=q)
        runs = runs.filter(text | tagged)
    if before_id is not None:
        runs = runs.filter(pk__lt=before_id)
    runs = runs.order_by("-id")
    return runs if limit is None else runs[:limit]


def _split_list(value: str | int | Iterable[str] | None) -> list[str]:
    if value is None:
        return []
    parts = str(value).split(",") if isinstance(value, str | int) else value
    return [part.strip() for part in parts if part.strip()]


def filter_in(
    runs: QuerySet[Run], column: str, values: list[Any], *, required: bool = False
) -> QuerySet[Run]:
    """Filter a column. One value uses `=`, which an index can return in order.

    An empty list means no filter, or, if `required`, no run.
    """
    if len(values) == 1:
        return runs.filter(**{column: values[0]})
    return runs.filter(**{f"{column}__in": values}) if values or required else runs
