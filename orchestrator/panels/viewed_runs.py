"""The runs of panels' sources and their names, limited to what the viewer may see."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Final

from django.db.models import QuerySet

from orchestrator.accounts import selectors as people
from orchestrator.accounts import teams
from orchestrator.accounts.models import User
from orchestrator.common.errors import Refusal
from orchestrator.panels.data import Empty, PanelRun
from orchestrator.panels.spec import PanelSpec, RunsSource
from orchestrator.run_table import selectors as run_table
from orchestrator.runs import selectors as runs
from orchestrator.runs.models import Run
from orchestrator.runs.states import ENDED
from orchestrator.telemetry import selectors as telemetry
from orchestrator.tracking import selectors as tracking

# kinds of panels that show media of a kind; the others show metrics
MEDIA_KINDS: Final = {
    "image": "image",
    "text": "text",
    "table": "table",
    "histogram": "histogram",
    "heatmap": "histogram",
}
_ONLY_MEDIA: Final = ("image", "text")


@dataclass(frozen=True, slots=True)
class ViewedRuns:
    """Runs of a source as one user sees them; `empty` says why there are none."""

    runs: tuple[Run, ...] = ()
    hidden: int = 0
    more: bool = False
    empty: Empty | None = None

    @property
    def entries(self) -> tuple[PanelRun, ...]:
        """The runs as data of a panel."""
        return tuple(PanelRun(str(run.pk), run.name, str(run.state)) for run in self.runs)

    @property
    def active(self) -> bool:
        """Whether a run may still log."""
        return any(run.state not in ENDED for run in self.runs)

    def seen_by(self, user: User) -> ViewedRuns:
        """Without the runs that another user does not see."""
        owners = people.visible_owners(user)
        if owners is None:
            return self
        seen = tuple(run for run in self.runs if run.owner_id in owners)
        hidden = len(self.runs) - len(seen)
        empty = Empty("no_source") if hidden and not seen else self.empty
        return replace(self, runs=seen, hidden=self.hidden + hidden, empty=empty)


@dataclass(frozen=True, slots=True)
class PanelViewer:
    """Who looks at the panels of one page; reads each source and its names once.

    `subject` is the source of panels that have none of their own; `also` are users who must see a
    run too.
    """

    user: User
    subject: RunsSource | None = None
    also: tuple[User, ...] = ()
    _runs: dict[str, ViewedRuns] = field(default_factory=dict)
    _names: dict[tuple[str, str], list[str]] = field(default_factory=dict)

    def runs(self, panel: PanelSpec) -> ViewedRuns:
        """The runs of the panel that the user sees."""
        return self.runs_of_source(panel.runs or self.subject)

    def names(self, panel: PanelSpec) -> list[str]:
        """Sorted names of metrics or media that the panel can show."""
        return self.names_of_source(panel.runs or self.subject, panel.kind)

    def runs_of_source(self, source: RunsSource | None) -> ViewedRuns:
        """The runs of a source that the user sees."""
        key = _key(source)
        if key not in self._runs:
            viewed = viewed_runs(source=source, user=self.user)
            for other in self.also:
                viewed = viewed.seen_by(other)
            self._runs[key] = viewed
        return self._runs[key]

    def names_of_source(self, source: RunsSource | None, kind: str) -> list[str]:
        """Sorted names of metrics or media that a panel of this kind can show of a source."""
        key = (_key(source), kind if kind in MEDIA_KINDS else "line")
        if key not in self._names:
            self._names[key] = names_of(self.runs_of_source(source).runs, kind)
        return self._names[key]


def names_of(runs: Sequence[Run], kind: str) -> list[str]:
    """Sorted names that a panel of this kind can show of the runs."""
    ids = [run.pk for run in runs]
    names = set[str]()
    if kind not in _ONLY_MEDIA:
        names |= telemetry.metric_names_of_runs(ids)
    if kind in MEDIA_KINDS:
        names |= tracking.media_names_of_runs(ids, kinds=[MEDIA_KINDS[kind]])
    return sorted(names)


def _key(source: RunsSource | None) -> str:
    return "" if source is None else source.to_json()


def viewed_runs(*, source: RunsSource | None, user: User) -> ViewedRuns:
    """The source's newest runs that the user sees; chosen runs in their own order.

    A source that the user may not see is the same as a missing one.
    """
    if source is None:
        return ViewedRuns(empty=Empty("no_source"))
    if source.runs:
        return _chosen(source, user)
    try:
        rows = _rows(source, user)
    except Refusal as refusal:
        if source.query is not None:
            message = refusal.errors[0]["message"] if refusal.errors else refusal.detail
            return ViewedRuns(empty=Empty("bad_query", source.query, detail=message))
        return ViewedRuns(empty=Empty("no_source"))
    some = tuple(rows.order_by("-id")[: source.limit + 1])
    empty = None if some else Empty("no_runs", source.query or "")
    return ViewedRuns(some[: source.limit], more=len(some) > source.limit, empty=empty)


def _rows(source: RunsSource, user: User) -> QuerySet[Run]:
    if source.experiment is not None:
        experiment = runs.experiment_get(user=user, id=source.experiment)
        return runs.runs_visible_to(user=user).filter(experiment=experiment)
    if source.team is not None:
        team = teams.team_get(user=user, id=source.team)
        members = teams.members_of(team=team).values_list("user_id", flat=True)
        return runs.runs_visible_to(user=user).filter(owner_id__in=list(members))
    return run_table.table_runs(user=user, query=source.query or "")


def _chosen(source: RunsSource, user: User) -> ViewedRuns:
    wanted = [int(id) for id in dict.fromkeys(source.runs)]
    visible = runs.runs_visible_to(user=user).filter(pk__in=wanted)
    by_id = {run.pk: run for run in visible}
    shown = tuple(by_id[id] for id in wanted if id in by_id)
    empty = None if shown else Empty("no_source")
    return ViewedRuns(shown, hidden=len(wanted) - len(shown), empty=empty)
