"""Reads experiments, runs and what belongs to them, only what the asker may see, a page at a time.

Whoever shares no team with a run's owner gets the same answer as for a run that does not exist.
"""

from __future__ import annotations

from collections.abc import Iterable
from datetime import datetime, timedelta
from pathlib import PurePath
from typing import Any

from django.conf import settings
from django.db.models import Count, Exists, OuterRef, Q, QuerySet

from orchestrator.accounts import selectors as people
from orchestrator.accounts.models import User
from orchestrator.common import clock
from orchestrator.common.errors import not_found
from orchestrator.common.units import is_id
from orchestrator.runs.models import (
    Artifact,
    Attempt,
    Checkpoint,
    Experiment,
    Run,
    RunEvent,
    RunTag,
)
from orchestrator.runs.serializers import (
    artifact_answer,
    attempt_answer,
    checkpoint_answer,
    event_answer,
    experiment_answer,
    run_answer,
)
from orchestrator.runs.states import ENDED
from workers.contracts.wire.node_messages import AttemptState, RunState

__all__ = [
    "artifact_answer",
    "artifacts_of",
    "attempt_answer",
    "attempt_by_fence",
    "attempts_of",
    "attempts_on",
    "checkpoint_answer",
    "checkpoints_of",
    "event_answer",
    "events_of",
    "events_visible_to",
    "experiment_answer",
    "experiment_get",
    "experiments_visible_to",
    "external_silent",
    "forked_at",
    "forks_of",
    "launch_spec",
    "resume_point",
    "run_answer",
    "run_get",
    "run_list",
    "runs_visible_to",
    "state_counts",
]


def runs_visible_to(*, user: User) -> QuerySet[Run]:
    """Runs of one's own and of team mates; for operators all. Owner and experiment are at hand."""
    runs = Run.objects.select_related("owner", "experiment")
    owners = people.visible_owners(user)
    if owners is None:
        return runs
    return _among(runs, "owner_id", owners)


def run_get(*, user: User, id: int | str) -> Run:
    """The run, with its tags. Raises 404 for one that is not there or not this person's to see."""
    if is_id(id):
        found = runs_visible_to(user=user).prefetch_related("tags").filter(pk=int(id)).first()
        if found is not None:
            return found
    raise not_found("run", id)


def run_list(
    *,
    user: User,
    state: str | Iterable[str] | None = None,
    kind: str | Iterable[str] | None = None,
    experiment: str | int | Iterable[str] | None = None,
    tag: str | Iterable[str] | None = None,
    owner: str | Iterable[str] | None = None,
    q: str | None = None,
    before_id: int | None = None,
    limit: int = 50,
    within: QuerySet[Run] | None = None,
) -> list[Run]:
    """At most `limit` runs, newest first, below `before_id`; tags are at hand.

    Each filter takes one value, several, or a comma list. `experiment` is an id or a name, `owner`
    a user name or `me`;
    `q` is looked for in names, notes, models and tags. `within` is what `runs_visible_to` answered
    this person, where
    the caller has it already: that asks for their teams once.
    """
    runs = runs_visible_to(user=user) if within is None else within
    runs = _among(runs, "state", _words(state))
    runs = _among(runs, "kind", _words(kind))
    if experiments := _words(experiment):
        numbers = [int(word) for word in experiments if is_id(word)]
        which = Experiment.objects.filter(Q(name__in=experiments) | Q(pk__in=numbers))
        runs = _among(runs, "experiment_id", list(which.values_list("id", flat=True)), asked=True)
    if tags := _words(tag):
        runs = runs.filter(Exists(RunTag.objects.filter(run=OuterRef("pk"), name__in=tags)))
    if owners := _words(owner):
        names = [user.username if word == "me" else word for word in owners]
        owned = User.objects.filter(username__in=names)
        runs = _among(runs, "owner_id", list(owned.values_list("id", flat=True)), asked=True)
    if q:
        tagged = Q(pk__in=RunTag.objects.filter(name__icontains=q).values("run_id"))
        words = Q(name__icontains=q) | Q(notes__icontains=q) | Q(model_name__icontains=q)
        runs = runs.filter(words | tagged)
    if before_id is not None:
        runs = runs.filter(pk__lt=before_id)
    return list(runs.prefetch_related("tags").order_by("-id")[:limit])


def state_counts(*, user: User | None, within: QuerySet[Run] | None = None) -> dict[str, int]:
    """How many visible runs are in each state, of all runs without a user; states without runs are
    left out.

    `within` as for `run_list`.
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
    """Events numbered above `after`, ascending; with `newest`, the last `limit` of them instead of
    the first.

    `types` keeps these types only, `without` leaves these out.
    """
    found = RunEvent.objects.filter(run=run, seq__gt=after)
    if types:
        found = found.filter(type__in=list(types))
    if without:
        found = found.exclude(type__in=list(without))
    if newest:
        return list(reversed(found.order_by("-seq")[:limit]))
    return list(found.order_by("seq")[:limit])


def events_visible_to(
    *,
    user: User,
    run: Run | None = None,
    before_id: int | None = None,
    limit: int = 50,
    types: Iterable[str] | None = None,
    without: Iterable[str] = (),
) -> list[RunEvent]:
    """Events of all visible runs, or of one, newest first, below the row `before_id`; their runs
    are at hand.
    """
    found = RunEvent.objects.select_related("run")
    if run is not None:
        found = found.filter(run=run)
    owners = people.visible_owners(user)
    if owners is not None:
        found = found.filter(run__owner_id__in=owners)
    if types:
        found = found.filter(type__in=list(types))
    if without:
        found = found.exclude(type__in=list(without))
    if before_id is not None:
        found = found.filter(pk__lt=before_id)
    return list(found.order_by("-id")[:limit])


def attempts_of(*, run: Run) -> QuerySet[Attempt]:
    """Newest first."""
    return Attempt.objects.filter(run=run).order_by("-number")


def attempts_on(*, node: str) -> list[Attempt]:
    """Attempts that are not over and have a share on that node, with their runs: whom draining it
    concerns.
    """
    alive = (
        Attempt.objects.exclude(state=AttemptState.EXITED)
        .exclude(run__kind="external")
        .select_related("run")
    )
    return [
        attempt
        for attempt in alive.order_by("id")
        if any(share["node"] == node for share in attempt.placement)
    ]


def attempt_by_fence(*, attempt_id: int | str, fence: str) -> Attempt | None:
    """The attempt that a report is about, with its run; None for a stale or unknown fence."""
    found = (
        Attempt.objects.filter(pk=int(attempt_id)) if is_id(attempt_id) else Attempt.objects.none()
    )
    attempt = found.select_related("run").first()
    return attempt if attempt is not None and str(attempt.fence) == str(fence) else None


def checkpoints_of(*, run: Run, kept: bool = True) -> QuerySet[Checkpoint]:
    """Newest first; those still on disk, unless asked for all."""
    found = Checkpoint.objects.filter(run=run).order_by("-step", "-id")
    return found.filter(deleted=None) if kept else found


def forks_of(*, run: Run, user: User) -> list[dict[str, Any]]:
    """`[{run, step}]` of runs forked from this one that this person may see, newest first, at most
    50.
    """
    found = list(runs_visible_to(user=user).filter(forked_from=run).order_by("-id")[:50])
    steps = dict(Checkpoint.objects.filter(run__in=found, attempt=0).values_list("run_id", "step"))
    return [{"run": each, "step": steps.get(each.pk)} for each in found]


def forked_at(run: Run) -> int | None:
    """The step that a fork began with."""
    return Checkpoint.objects.filter(run=run, attempt=0).values_list("step", flat=True).first()


def resume_point(run: Run) -> dict[str, Any] | None:
    """`{path, step}` of the newest checkpoint kept, which the next attempt goes on from; None: from
    the start.
    """
    newest = checkpoints_of(run=run).first()
    return {"path": newest.path, "step": newest.step} if newest else None


def launch_spec(run: Run) -> dict[str, Any]:
    """The spec as nodes get it: with the resolved plan in place of "auto" or none."""
    made = {**run.spec, "plan": run.plan} if run.plan else dict(run.spec)
    body = made.get("generate")
    if isinstance(body, dict) and not PurePath(str(body.get("output"))).is_absolute():
        # in the run's folder, above the attempt's that programs start in: the next attempt goes on
        # with the same file
        made["generate"] = {**body, "output": f"../{body['output']}"}
    return made


def artifacts_of(*, run: Run) -> QuerySet[Artifact]:
    return Artifact.objects.filter(run=run).order_by("name")


def experiments_visible_to(*, user: User) -> QuerySet[Experiment]:
    """Newest first, with `run_count`; of one's own and of team mates."""
    found = (
        Experiment.objects.select_related("owner").annotate(run_count=Count("runs")).order_by("-id")
    )
    owners = people.visible_owners(user)
    return found if owners is None else found.filter(owner_id__in=owners)


def experiment_get(*, user: User, id: int | str) -> Experiment:
    """By id. Raises 404 as `run_get` does."""
    if is_id(id):
        found = experiments_visible_to(user=user).filter(pk=int(id)).first()
        if found is not None:
            return found
    raise not_found("experiment", id)


def external_silent(*, now: datetime | None = None) -> QuerySet[Run]:
    """External runs that should have ended by silence: without a word for longer than the setting
    allows.
    """
    before = (now or clock.now()) - timedelta(seconds=settings.ENV.external_silent_s)
    alive = Run.objects.filter(kind="external").exclude(state__in=[str(state) for state in ENDED])
    return alive.filter(
        Q(last_seen__lt=before) | Q(last_seen=None, created__lt=before), state=RunState.RUNNING
    )


def _words(given: str | int | Iterable[str] | None) -> list[str]:
    if given is None:
        return []
    parts = str(given).split(",") if isinstance(given, str | int) else given
    return [word.strip() for word in parts if word.strip()]


def _among(
    runs: QuerySet[Run], column: str, wanted: list[Any], *, asked: bool = False
) -> QuerySet[Run]:
    """One value keeps `=`, which an index answers in order.

    An empty list is no filter, but if `asked`, no run.
    """
    if len(wanted) == 1:
        return runs.filter(**{column: wanted[0]})
    return runs.filter(**{f"{column}__in": wanted}) if wanted or asked else runs
