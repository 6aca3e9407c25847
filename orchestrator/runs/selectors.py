"""Reads experiments, runs and their objects, limited to what the user may see.

A user who shares no team with the owner gets the same error as for a missing object.
"""

from __future__ import annotations

import uuid
from collections.abc import Collection, Iterable, Sequence
from datetime import datetime, timedelta
from pathlib import Path, PurePath
from typing import Any, BinaryIO, Required, TypedDict, Unpack

from django.conf import settings
from django.db.models import Count, Exists, OuterRef, Q, QuerySet, Subquery

from orchestrator.accounts import selectors as people
from orchestrator.accounts.models import User
from orchestrator.common import clock
from orchestrator.common.compiled_query import CompiledQuery
from orchestrator.common.errors import missing_object
from orchestrator.common.units import is_id
from orchestrator.runs.datasets.resolve import paths_of_texts
from orchestrator.runs.models import (
    Artifact,
    Attempt,
    AttemptShare,
    Checkpoint,
    Experiment,
    Run,
    RunEvent,
    RunTag,
)
from orchestrator.runs.serializers import (
    elastic_of,
    serialize_artifact,
    serialize_attempt,
    serialize_checkpoint,
    serialize_event,
    serialize_experiment,
    serialize_run,
    serialize_runs,
)
from orchestrator.runs.states import ENDED
from orchestrator.runs.submission.run_paths import open_file_of_run, run_of_path, runs_named
from orchestrator.runs.submission.script_secrets import values_by_run as script_secrets_of
from orchestrator.runs.submission.weights import models_root
from workers.contracts.specs.training_rules.elastic import spec_at
from workers.contracts.wire.node_messages import AttemptState, RunState

__all__ = [
    "active_values",
    "artifact_open",
    "artifacts_of",
    "attempt_by_fence",
    "attempts_of",
    "attempts_on",
    "checkpoints_of",
    "elastic_of",
    "events_of",
    "events_visible_to",
    "experiment_get",
    "experiments_visible_to",
    "external_silent",
    "forked_at",
    "forks_of",
    "launch_spec",
    "nodes_of",
    "resume_point",
    "run_get",
    "run_list",
    "run_rows",
    "runs_matching",
    "runs_read_by",
    "runs_seen_since",
    "runs_visible_to",
    "script_secrets_of",
    "serialize_artifact",
    "serialize_attempt",
    "serialize_checkpoint",
    "serialize_event",
    "serialize_experiment",
    "serialize_run",
    "shares_on",
    "state_counts",
    "values_of",
    "waiting_runs",
]


_run_by_id = CompiledQuery(
    lambda id: Run.objects.select_related("owner", "experiment").filter(pk=id).order_by(), int
)


def runs_visible_to(*, user: User) -> QuerySet[Run]:
    """Runs of the user and of team members; for operators all. Selects owner and experiment."""
    runs = Run.objects.select_related("owner", "experiment")
    owners = people.visible_owners(user)
    if owners is None:
        return runs
    return _filter_in(runs, "owner_id", owners)


def runs_seen_since(
    since: datetime, *, owners: Collection[int] | None, limit: int
) -> list[tuple[int, int, dict[str, Any]]]:
    """`(owner, run, summary)` of active runs of these owners (None: all) that reported since then.

    The newest reports come first.
    """
    active = [str(state) for state in RunState if state not in ENDED]
    rows = Run.objects.filter(state__in=active, last_seen__gte=since).exclude(summary={})
    if owners is not None:
        rows = _filter_in(rows, "owner_id", sorted(owners))
    return list(rows.order_by("-last_seen").values_list("owner_id", "pk", "summary")[:limit])


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
    runs = _filter_in(runs, "state", _split_list(state))
    runs = _filter_in(runs, "kind", _split_list(kind))
    if experiments := _split_list(experiment):
        numbers = [int(text) for text in experiments if is_id(text)]
        which = Experiment.objects.filter(Q(name__in=experiments) | Q(pk__in=numbers))
        runs = _filter_in(
            runs, "experiment_id", list(which.values_list("id", flat=True)), required=True
        )
    if tags := _split_list(tag):
        runs = runs.filter(Exists(RunTag.objects.filter(run=OuterRef("pk"), name__in=tags)))
    if owners := _split_list(owner):
        names = [user.username if name == "me" else name for name in owners]
        owned = User.objects.filter(username__in=names)
        runs = _filter_in(runs, "owner_id", list(owned.values_list("id", flat=True)), required=True)
    if q:
        tagged = Q(pk__in=RunTag.objects.filter(name__icontains=q).values("run_id"))
        text = Q(name__icontains=q) | Q(notes__icontains=q) | Q(model_name__icontains=q)
        runs = runs.filter(text | tagged)
    if before_id is not None:
        runs = runs.filter(pk__lt=before_id)
    runs = runs.order_by("-id")
    return runs if limit is None else runs[:limit]


def waiting_runs(*, ids: Collection[int]) -> dict[int, Run]:
    """Queued runs with these primary keys, with their owners and without specs and plans."""
    rows = Run.objects.filter(pk__in=ids, state=RunState.QUEUED).select_related("owner")
    return {run.pk: run for run in rows.defer("spec", "plan", "prediction")}


def active_values(fields: Sequence[str]) -> list[tuple[Any, ...]]:
    """`(primary key, *fields)` of all runs that have devices or get them."""
    active = [RunState.STARTING, RunState.RUNNING, RunState.STOPPING]
    return list(Run.objects.filter(state__in=active).values_list("pk", *fields))


def values_of(ids: Collection[int], fields: Sequence[str]) -> dict[int, tuple[Any, ...]]:
    """The fields of these runs by primary key, for accounts that name no run."""
    rows = Run.objects.filter(pk__in=ids).values_list("pk", *fields)
    return {pk: tuple(values) for pk, *values in rows}


def state_counts(*, user: User | None, within: QuerySet[Run] | None = None) -> dict[str, int]:
    """Number of visible runs per state, of all runs without a `user`; omits empty states.

    `within` as in `run_list`.
    """
    if within is None:
        within = Run.objects.all() if user is None else runs_visible_to(user=user)
    rows = within.select_related(None).order_by().values_list("state").annotate(Count("id"))
    return dict(rows)


def events_of(
    *,
    run: Run,
    after: int = 0,
    limit: int = 200,
    types: Iterable[str] | None = None,
    without: Iterable[str] = (),
    newest: bool = False,
) -> list[RunEvent]:
    """Events numbered above `after`, ascending: the first `limit`, or with `newest` the last.

    `types` selects event types, `without` excludes some.
    """
    rows = RunEvent.objects.filter(run=run, seq__gt=after)
    if types:
        rows = rows.filter(type__in=list(types))
    if without:
        rows = rows.exclude(type__in=list(without))
    if newest:
        return list(reversed(rows.order_by("-seq")[:limit]))
    return list(rows.order_by("seq")[:limit])


def events_visible_to(
    *,
    user: User,
    run: Run | None = None,
    before_id: int | None = None,
    limit: int = 50,
    types: Iterable[str] | None = None,
    without: Iterable[str] = (),
    of_runs: Collection[int] | None = None,
    since: datetime | None = None,
) -> list[RunEvent]:
    """Events of all visible runs or of some, newest first, ids below `before_id`; selects runs."""
    rows = RunEvent.objects.select_related("run")
    if of_runs is not None:
        rows = rows.filter(run__in=of_runs)
    if since is not None:
        rows = rows.filter(time__gte=since)
    if run is not None:
        rows = rows.filter(run=run)
    owners = people.visible_owners(user)
    if owners is not None:
        rows = rows.filter(run__owner_id__in=owners)
    if types:
        rows = rows.filter(type__in=list(types))
    if without:
        rows = rows.exclude(type__in=list(without))
    if before_id is not None:
        rows = rows.filter(pk__lt=before_id)
    return list(rows.order_by("-id")[:limit])


def attempts_of(*, run: Run) -> QuerySet[Attempt]:
    """The run's attempts, newest first."""
    return Attempt.objects.filter(run=run).order_by("-number")


def attempts_on(*, node: str) -> list[Attempt]:
    """Attempts that have not ended and use the node, with their runs."""
    alive = Attempt.objects.exclude(state=AttemptState.EXITED).filter(shares__node=node)
    return list(alive.select_related("run").order_by("id"))


def shares_on(nodes: Collection[str]) -> list[tuple[str, str, int, str]]:
    """`(node, fence, attempt id, state)` of the parts on these nodes that have not exited."""
    rows = AttemptShare.objects.filter(node__in=nodes).exclude(state=AttemptState.EXITED)
    values = rows.values_list("node", "attempt__fence", "attempt_id", "state")
    return [(node, str(fence), attempt, state) for node, fence, attempt, state in values]


def attempt_ended(*, fence: str) -> Attempt | None:
    """The attempt with this fence if it has ended; None for any text that is no fence."""
    try:
        known = uuid.UUID(fence)
    except ValueError:
        return None
    return Attempt.objects.filter(fence=known, state=AttemptState.EXITED).first()


def attempt_by_fence(*, attempt_id: int | str, fence: str) -> Attempt | None:
    """The attempt of a report, with its run; None for a stale or unknown fence."""
    if not is_id(attempt_id):
        return None
    attempt = Attempt.objects.filter(pk=int(attempt_id)).select_related("run").first()
    return attempt if attempt is not None and str(attempt.fence) == str(fence) else None


def checkpoints_of(*, run: Run, retained: bool = True) -> QuerySet[Checkpoint]:
    """The run's checkpoints, newest first; by default only those that are still on disk."""
    rows = Checkpoint.objects.filter(run=run).select_related("copy").order_by("-step", "-id")
    return rows.filter(deleted=None) if retained else rows


def nodes_of(*, run: Run) -> list[str]:
    """The nodes of the run's newest attempt."""
    newest = Attempt.objects.filter(run=run).order_by("-number").first()
    return [str(share["node"]) for share in newest.placement] if newest is not None else []


def newest_checkpoints(*, user: User, limit: int) -> list[Checkpoint]:
    """The newest retained checkpoint of the newest visible runs that have one, with their runs."""
    newest = Checkpoint.objects.filter(run=OuterRef("run"), deleted=None).order_by("-step", "-id")
    rows = Checkpoint.objects.filter(
        pk=Subquery(newest.values("pk")[:1]), run__in=runs_visible_to(user=user)
    )
    return list(rows.select_related("run").order_by("-run_id")[:limit])


def forks_of(*, run: Run, user: User) -> list[dict[str, Any]]:
    """`[{run, step}]` of visible forks of this run, newest first, at most 50."""
    rows = list(runs_visible_to(user=user).filter(forked_from=run).order_by("-id")[:50])
    steps = dict(Checkpoint.objects.filter(run__in=rows, attempt=0).values_list("run_id", "step"))
    return [{"run": fork, "step": steps.get(fork.pk)} for fork in rows]


def forked_at(run: Run) -> int | None:
    """The step that a fork started from; None if the run is not a fork."""
    return Checkpoint.objects.filter(run=run, attempt=0).values_list("step", flat=True).first()


def resume_point(run: Run) -> dict[str, Any] | None:
    """`{path, step}` of the checkpoint that the next attempt continues from; None without one."""
    newest = checkpoints_of(run=run).first()
    return {"path": newest.path, "step": newest.step} if newest else None


def launch_spec(run: Run, attempt: Attempt | None = None) -> dict[str, Any]:
    """The spec for nodes: with the resolved plan, of an elastic run at the attempt's size."""
    spec = {**run.spec, "plan": run.plan} if run.plan else dict(run.spec)
    if attempt is not None and run.sizes and (plan := attempt.plan):
        spec = spec_at(run.spec, plan, attempt.devices or run.devices)
    for kind, default in (("generate", None), ("produce", "produced.jsonl")):
        body = spec.get(kind)
        output = str(body.get("output", default)) if isinstance(body, dict) else "/"
        if isinstance(body, dict) and not PurePath(output).is_absolute():
            # in the run's folder, above the attempt's working directory, so the next attempt
            # continues the same file
            spec[kind] = {**body, "output": f"../{output}"}
    return spec


def runs_read_by(run: Run) -> list[str]:
    """Ids of other runs whose files this one reads: its spec names them, or it is their fork."""
    ids = runs_named(
        {**run.spec, "data_set_paths": list(paths_of_texts(run.spec).values())},
        roots=[*settings.DATA_ROOTS, models_root(), settings.ENV.home],
        run_root=settings.ENV.media_runs,
    )
    ids |= {run.forked_from_id} if run.forked_from_id is not None else set()
    return [str(id) for id in sorted(ids - {run.pk})]


def artifact_open(artifact: Artifact) -> BinaryIO | None:
    """Open the artifact's file; None on another machine, and outside its own run's folder."""
    return open_file_of_run(artifact.run_id, artifact.path)


def artifacts_of(*, run: Run) -> QuerySet[Artifact]:
    """The run's artifacts by name."""
    return Artifact.objects.filter(run=run).select_related("copy").order_by("name")


def run_of_file(*, user: User, path: str) -> Run | None:
    """The run whose folder contains the path, if the user may see it."""
    number = run_of_path(Path(path), settings.ENV.media_runs)
    return None if number is None else runs_visible_to(user=user).filter(pk=number).first()


def adapter_runs(*, user: User, limit: int = 30) -> list[Run]:
    """The newest visible runs that trained an adapter and saved a checkpoint."""
    trained = runs_visible_to(user=user).filter(
        kind="train", spec__train__adapter__isnull=False, checkpoints__isnull=False
    )
    return list(trained.distinct().order_by("-pk")[:limit])


def experiments_visible_to(*, user: User) -> QuerySet[Experiment]:
    """Experiments of the user and of team members, newest first, with `run_count`."""
    rows = (
        Experiment.objects.select_related("owner").annotate(run_count=Count("runs")).order_by("-id")
    )
    owners = people.visible_owners(user)
    return rows if owners is None else rows.filter(owner_id__in=owners)


def experiment_get(*, user: User, id: int | str) -> Experiment:
    """The experiment with this id. Raises 404 as `run_get` does."""
    if is_id(id):
        rows = experiments_visible_to(user=user).filter(pk=int(id)).first()
        if rows is not None:
            return rows
    raise missing_object("experiment", id)


def external_silent(*, now: datetime | None = None) -> QuerySet[Run]:
    """External runs that sent nothing for longer than `external_silent_s`."""
    before = (now or clock.now()) - timedelta(seconds=settings.ENV.external_silent_s)
    alive = Run.objects.filter(kind="external").exclude(state__in=[str(state) for state in ENDED])
    return alive.filter(
        Q(last_seen__lt=before) | Q(last_seen=None, created__lt=before), state=RunState.RUNNING
    )


def _split_list(value: str | int | Iterable[str] | None) -> list[str]:
    if value is None:
        return []
    parts = str(value).split(",") if isinstance(value, str | int) else value
    return [part.strip() for part in parts if part.strip()]


def _filter_in(
    runs: QuerySet[Run], column: str, values: list[Any], *, required: bool = False
) -> QuerySet[Run]:
    """Filter a column. One value uses `=`, which an index can return in order.

    An empty list means no filter, or, if `required`, no run.
    """
    if len(values) == 1:
        return runs.filter(**{column: values[0]})
    return runs.filter(**{f"{column}__in": values}) if values or required else runs
