"""The read interface of `runs`: objects of runs and experiments, limited to what the user may see.

A user who shares no team with the owner gets the same error as for a missing object.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from datetime import datetime, timedelta
from pathlib import Path, PurePath
from typing import Any, BinaryIO

from django.conf import settings
from django.db.models import Count, OuterRef, Q, QuerySet, Subquery

from orchestrator.accounts import selectors as people
from orchestrator.accounts.models import User
from orchestrator.common import clock
from orchestrator.common.errors import missing_object
from orchestrator.common.units import is_id
from orchestrator.runs.datasets.resolve import paths_of_texts
from orchestrator.runs.models import (
    Artifact,
    Attempt,
    Checkpoint,
    Experiment,
    Run,
    RunEvent,
)
from orchestrator.runs.queries.attempts import (
    attempt_by_fence,
    attempt_ended,
    attempts_of,
    attempts_on,
    nodes_of,
    shares_on,
)
from orchestrator.runs.queries.run_list import (
    RunFilters,
    filter_in,
    run_get,
    run_list,
    run_rows,
    runs_failed_since,
    runs_matching,
    runs_visible_to,
)
from orchestrator.runs.serializers import (
    elastic_of,
    serialize_artifact,
    serialize_attempt,
    serialize_checkpoint,
    serialize_event,
    serialize_experiment,
    serialize_run,
)
from orchestrator.runs.states import ENDED
from orchestrator.runs.submission.run_paths import open_file_of_run, run_of_path, runs_named
from orchestrator.runs.submission.script_secrets import values_by_run as script_secrets_of
from orchestrator.runs.submission.weights import models_root
from workers.contracts.specs.training_rules.elastic import spec_at
from workers.contracts.wire.node_messages import RunState

__all__ = [
    "RunFilters",
    "active_values",
    "artifact_open",
    "artifacts_of",
    "attempt_by_fence",
    "attempt_ended",
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
    "runs_failed_since",
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


def runs_seen_since(
    since: datetime, *, owners: Collection[int] | None, limit: int
) -> list[tuple[int, int, dict[str, Any]]]:
    """`(owner, run, summary)` of active runs of these owners (None: all) that reported since then.

    The newest reports come first.
    """
    active = [str(state) for state in RunState if state not in ENDED]
    rows = Run.objects.filter(state__in=active, last_seen__gte=since).exclude(summary={})
    if owners is not None:
        rows = filter_in(rows, "owner_id", sorted(owners))
    return list(rows.order_by("-last_seen").values_list("owner_id", "pk", "summary")[:limit])


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
    or_failed: bool = False,
) -> list[RunEvent]:
    """Events of all visible runs or of some, newest first, ids below `before_id`.

    With the names of their runs. Reading the whole runs took half of the time. `or_failed` adds to
    `types` the changes of runs to the state failed.
    """
    own = [field.name for field in RunEvent._meta.concrete_fields]
    rows = RunEvent.objects.select_related("run").only(*own, "run__name")
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
        wanted = Q(type__in=list(types))
        if or_failed:
            wanted |= Q(type="state_changed", data__of="run", data__new="failed")
        rows = rows.filter(wanted)
    if without:
        rows = rows.exclude(type__in=list(without))
    if before_id is not None:
        rows = rows.filter(pk__lt=before_id)
    return list(rows.order_by("-id")[:limit])


def checkpoints_of(*, run: Run, retained: bool = True) -> QuerySet[Checkpoint]:
    """The run's checkpoints, newest first; by default only those that are still on disk."""
    rows = Checkpoint.objects.filter(run=run).select_related("copy").order_by("-step", "-id")
    return rows.filter(deleted=None) if retained else rows


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
