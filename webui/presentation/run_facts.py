"""Data that all tabs of a run page share: the run, newest metrics, events and headline.

Costs at most nine queries. Does not depend on markup.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from functools import cached_property
from typing import Any, Final

from django.utils.translation import gettext as _
from django.utils.translation import gettext_noop

from orchestrator.common import clock, live
from orchestrator.runs import selectors as runs
from orchestrator.runs import services
from orchestrator.runs.outputs import endpoint as endpoints
from orchestrator.runs.outputs import evaluation_results, generated_answers, produced_lines
from orchestrator.scheduling import selectors as scheduling
from orchestrator.telemetry import selectors as telemetry
from orchestrator.tracking import selectors as tracking
from webui.charts.axes import per_step
from webui.presentation import event_messages, formatting, run_headlines
from webui.presentation.event_messages import EventMessage
from workers.contracts.specs.finetuning.objectives import BODIES

ANSWERING: Final = ("serve", "generate", "evaluate")
# runs whose own program may record configuration and media
RECORDING: Final = ("external", "script")
TYPICAL: Final = ("tokens_per_s", "mfu", "inference/tokens_per_s", "inference/scores_per_s")
EVENTS: Final = 120  # newest, in the list and on charts
SHOWN_EVENTS: Final = 30
# tabs of inference runs
_INFERENCE_TABS: Final = {
    "chat": "serve",
    "requests": "serve",
    "cache": "serve",
    "answers": "generate",
    "produced": "produce",
    "evaluation": "evaluate",
}
_NUMERICS: Final = ("loss_scale", "grad_norm", "grad_underflow/", "moe/")
TAB_TITLES: Final = {
    "benchmark": gettext_noop("Results"),
    "chat": gettext_noop("Chat"),
    "answers": gettext_noop("Answers"),
    "produced": gettext_noop("Lines"),
    "evaluation": gettext_noop("Results"),
    "summary": gettext_noop("Summary"),
    "data": gettext_noop("Data"),
    "requests": gettext_noop("Requests"),
    "cache": gettext_noop("Cache"),
    "trials": gettext_noop("Plan trials"),
    "performance": gettext_noop("Performance"),
    "memory": gettext_noop("Memory"),
    "media": gettext_noop("Media"),
    "numerics": gettext_noop("Numerics"),
    "system": gettext_noop("System"),
    "dashboards": gettext_noop("Dashboards"),
    "logs": gettext_noop("Logs"),
    "checkpoints": gettext_noop("Checkpoints and artifacts"),
    "lineage": gettext_noop("Lineage"),
    "code": gettext_noop("Code"),
    "config": gettext_noop("Config"),
    "history": gettext_noop("History"),
}

_SCORE: Final = gettext_noop("Score")  # title of the tab "chat" of a reward model


def read(*, user: Any, id: int) -> Facts:
    """Read a run's facts. Raises Refusal 404 if it is missing or not visible to the user."""
    return facts_for(run=runs.run_get(user=user, id=id), user=user)


def facts_for(*, run: Any, user: Any) -> Facts:
    """Return the facts of a run that the user may see."""
    # read the topic's head first: points that arrive meanwhile come again as frames, counted once
    epoch, seq = live.heads([f"run:{run.pk}"]).get(f"run:{run.pk}", ("", 0))
    return Facts(run=run, user=user, epoch=epoch, seq=seq, latest=telemetry.latest(run=run))


@dataclass(frozen=True)
class Facts:
    """A run as `user` sees it; `epoch` and `seq` are the live topic's position."""

    run: Any
    user: Any
    epoch: str
    seq: int
    latest: dict[str, float]

    @property
    def names(self) -> list[str]:
        """Names of the run's metrics."""
        return sorted(self.latest)

    @cached_property
    def events(self) -> list[EventMessage]:
        """The run's events, newest first."""
        rows = runs.events_of(
            run=self.run, limit=EVENTS, newest=True, without=event_messages.NOT_LISTED
        )
        return [event_messages.event_message(event) for event in reversed(rows)]

    @cached_property
    def per_step(self) -> dict[str, float]:
        """Tokens and FLOPs per step, if known."""
        return per_step(self.run.spec, self.run.plan)

    @property
    def plan(self) -> dict[str, Any]:
        """The plan as resolved, else as submitted; empty if unknown or "auto"."""
        plan = self.run.plan or self.run.spec.get("plan")
        return plan if isinstance(plan, dict) else {}

    @property
    def objective(self) -> str:
        """`train.objective`; pretrain for runs without one."""
        return str((self.run.spec.get("train") or {}).get("objective") or "pretrain")

    @property
    def fine_tunes(self) -> bool:
        """Whether the run trains on examples, or a part of its weights."""
        train = self.run.spec.get("train") or {}
        return bool(self.reads_examples or train.get("adapter") or train.get("freeze"))

    @property
    def reads_examples(self) -> bool:
        """Whether the run trains on examples of one format rather than on text."""
        return self.objective in BODIES

    @cached_property
    def may_manage(self) -> bool:
        """Whether the user may act on the run."""
        return services.may_manage(self.run, self.user)

    def tabs(self) -> list[tuple[str, str]]:
        """`(name, title)` of the tabs that have content for this run."""
        names, kind = self.latest, self.run.kind
        trains = kind in ("train", "script")
        # steps of a benchmark belong to many plans: curves of time and memory would mix them
        if kind == "benchmark":
            own = ("benchmark", "summary", "logs", "config", "history")
            return [(name, _(title)) for name, title in TAB_TITLES.items() if name in own]
        shown = {
            **{name: kind == owner for name, owner in _INFERENCE_TABS.items()},
            "benchmark": False,
            "trials": bool(self.run.spec.get("autotune")),
            "data": self.fine_tunes,
            "performance": trains or "step_time_s" in names or "tokens_per_s" in names,
            "memory": kind not in ("external", "produce")
            or any(name.startswith("memory/") for name in names),
            "numerics": kind == "train" or any(name.startswith(_NUMERICS) for name in names),
            "system": kind in ANSWERING
            or any(name.startswith(("device/", "system/")) for name in names),
            "lineage": kind in ("train", "produce", "script", *ANSWERING),
            "media": self.has_media,
            "code": kind == "script" or self.has_origin,
            "checkpoints": kind not in ("external", "serve"),
        }
        titles = {**TAB_TITLES, "chat": _SCORE} if self.scores else TAB_TITLES
        return [(name, _(title)) for name, title in titles.items() if shown.get(name, True)]

    @cached_property
    def details(self) -> Any:
        """What the run's program recorded about itself; None if nothing, or if Orrery trains."""
        return tracking.details_of(run=self.run) if self.run.kind in RECORDING else None

    @property
    def has_origin(self) -> bool:
        """Whether the program recorded its command, commit, diff or packages."""
        row = self.details
        return row is not None and bool(row.program or row.diff or row.requirements)

    @cached_property
    def has_media(self) -> bool:
        """Whether the program logged images or other media."""
        return self.run.kind in RECORDING and tracking.media_exist(run=self.run)

    @cached_property
    def scores(self) -> bool:
        """Whether the run serves a reward model, which scores answers and writes none."""
        serving = self.endpoint.serving if self.endpoint is not None else None
        # an ended run has no endpoint but its metrics
        return (serving is not None and serving.pooling) or "inference/score_s" in self.latest

    def headline(self, *, trending: bool) -> str:
        """Return the run's headline.

        `trending` reads the loss curve (five more queries); the page's first pulse adds it.
        """
        run, now = self.run, clock.now()
        times = self.times
        last = scheduling.last_step(run.kind, run.summary.get("time"), times.started)
        curve = (
            telemetry.sparkline(run_ids=[run.pk], name="loss").get(run.pk, []) if trending else []
        )
        expected = scheduling.expected_start(run)
        facts = run_headlines.RunFacts(
            state=run.state,
            kind=run.kind,
            requested=run.requested,
            wait_reason=run.wait_reason,
            devices=(self.elastic or {}).get("devices") or run.devices,
            attempt=run.attempt_number,
            summary={**self.latest, **run.summary, **self.typical},
            exit=run.exit,
            loss_curve=curve,
            runtime_s=self.ran_s,
            restarted=run.kind == "train" and last is None and times.started is not None,
            last_step_s=now.timestamp() - last
            if last is not None and run.state == "running"
            else None,
            predicted_mfu=(run.prediction or {}).get("mfu"),
            phase=self.endpoint.phase if self.endpoint is not None else "",
            answered=generated_answers.count_answers(run)
            if generated_answers.is_available(run)
            else None,
            wanted=body.count if (body := produced_lines.body_of(run)) is not None else None,
            metrics=self.evaluated.metrics if self.evaluated is not None else None,
            starts_in_s=_seconds_until(expected, now),
            sooner=expected.sooner if expected is not None else "",
        )
        return run_headlines.run_headline(facts)

    @cached_property
    def typical(self) -> dict[str, float]:
        """Medians of throughput and MFU over all steps of an ended run, as on Compare and Runs."""
        if self.run.state not in run_headlines.ENDED:
            return {}
        return telemetry.medians([self.run.pk], TYPICAL).get(self.run.pk, {})

    @cached_property
    def elastic(self) -> dict[str, Any] | None:
        """Range, current devices and sizes of an elastic run; None for a fixed size."""
        return runs.elastic_of([(self.run.pk, self.run.sizes)])[self.run.pk]

    @cached_property
    def ran_s(self) -> float | None:
        """Seconds for which the run's attempts ran, without waits and pauses.

        Of an external run the time that its points cover, if they cover more than two times.
        """
        run, now = self.run, clock.now()
        if run.kind != "external":
            return self.times.ran_s if self.times.started else None
        seen = telemetry.progress(run=run, attempt=run.attempt_number)
        if seen is not None and seen.last > seen.first:
            return (seen.last if run.ended else max(seen.last, now.timestamp())) - seen.first
        return ((run.ended or now) - run.started).total_seconds() if run.started else None

    @cached_property
    def times(self) -> scheduling.RunTime:
        """Time and device time of the run's attempts."""
        return scheduling.run_times([self.run.pk]).get(self.run.pk, scheduling.RunTime())

    @cached_property
    def endpoint(self) -> endpoints.EndpointStatus | None:
        """The endpoint status of a serve run; None for other kinds."""
        return endpoints.status(run=self.run) if self.run.kind == "serve" else None

    @cached_property
    def evaluated(self) -> Any:
        """The results of an evaluate run; None before they exist and for other kinds."""
        return evaluation_results.evaluated(run=self.run) if self.run.kind == "evaluate" else None

    def progress(self) -> float | None:
        """The fraction of requested steps or prompts that is done."""
        if generated_answers.is_available(self.run):
            done, lines = generated_answers.count_answers(self.run)
            return min(1.0, done / lines) if lines else None
        if (body := produced_lines.body_of(self.run)) is not None:
            accepted = self.latest.get("produce/accepted")
            return min(1.0, accepted / body.count) if accepted is not None else None
        step, steps = self.run.summary.get("step"), self.run.summary.get("steps")
        return min(1.0, step / steps) if step is not None and steps else None

    def head(self, *, trending: bool = False) -> dict[str, Any]:
        """Return the template context of the part above the tabs."""
        run, done = self.run, self.progress()
        return {
            "run": run,
            "tag_names": sorted(tag.name for tag in run.tags.all()),
            "plan": run.plan or run.spec.get("plan"),
            "sentence": self.headline(trending=trending and run.state == "running"),
            "progress": f"{100 * done:.1f}" if done is not None else "",
            "actions": actions(run) if self.may_manage else [],
            "may_manage": self.may_manage,
            "has_priority": run.kind != "external" and run.state not in run_headlines.ENDED,
            "events": self.events[:SHOWN_EVENTS],
            "more_events": len(self.events) > SHOWN_EVENTS,
            "marks": [
                event.mark(self.per_step)
                for event in self.events
                if event_messages.shown_on_charts(event)
            ],
            "epoch": self.epoch,
            "seq": self.seq,
            "latest": self.latest,
            "engine_job": self.engine_job(),
            "elastic": self.elastic,
            "runtime": formatting.duration(self.ran_s) if self.ran_s is not None else "",
        }

    def engine_job(self) -> str:
        """Return which job of another engine runs the run, in one line; empty for its own."""
        job = scheduling.engine_job_of(self.run)
        if job is None:
            return ""
        values = {
            "kind": job.engine.get_kind_display(),
            "engine": job.engine.name,
            "number": job.number,
        }
        if not job.number:
            return _("%(kind)s %(engine)s, no job yet") % values
        return _("%(kind)s %(engine)s, job %(number)s") % values

    def source(self) -> dict[str, Any]:
        """Return what the page's script needs to fetch and place points."""
        run = self.run
        return {
            "id": run.pk,
            "name": f"run-{run.pk}",
            "title": _("run %(id)s %(name)s") % {"id": run.pk, "name": run.name},
            "series": f"/api/v1/runs/{run.pk}/series",
            "curves_url": f"/api/v1/runs/{run.pk}/curves",
            "socket": f"/ws/runs/{run.pk}/",
            "epoch": self.epoch,
            "after": self.seq,
            "per_step": self.per_step,
            "names": self.names,
            "ended": run.state in run_headlines.ENDED,
            # steps of an engine mean nothing to its users
            "axis": "time" if run.kind in ANSWERING else "step",
        }


def actions(run: Any) -> list[dict[str, str]]:
    """Return the available actions, the likeliest first: `{name, label, style, description}`."""
    state, managed = run.state, run.kind != "external"
    inference = run.kind in (*ANSWERING, "produce")
    available = []
    if state == "paused":
        description = _("Continue from the newest checkpoint")
        available.append(_action("resume", _("Resume"), "primary", description))
    if state in ("failed", "cancelled") and managed:
        description = _("Queue the run again, from its newest checkpoint")
        available.append(_action("retry", _("Retry"), "primary", description))
    if state == "running" and run.kind == "train":
        description = _("Save a checkpoint at the next step")
        available.append(_action("checkpoint", _("Checkpoint now"), "", description))
        description = _("Profile the next step with torch.profiler and save it as an artifact")
        available.append(_action("profile", _("Profile now"), "", description))
        description = _("Record the next step's memory allocations and save them as an artifact")
        available.append(_action("memory-snapshot", _("Memory snapshot"), "", description))
    if state in ("queued", "starting", "running") and managed:
        description = (
            _("Finish running requests, then release the devices")
            if inference
            else _("Save a checkpoint, then release the devices")
        )
        available.append(_action("pause", _("Pause"), "", description))
    if managed:
        description = _("Submit the same spec as a new run")
        available.append(_action("clone", _("Clone"), "", description))
    if state not in run_headlines.ENDED and not (state == "stopping" and run.requested == "cancel"):
        label, description = _("Cancel"), _("End the run; its checkpoints are kept")
        if run.kind == "serve":
            label, description = _("Stop"), _("End the run; running requests may finish")
        elif inference:
            description = _("End the run")
        available.append(_action("cancel", label, "danger", description))
    return available


def _action(name: str, label: str, style: str, description: str) -> dict[str, str]:
    return {"name": name, "label": label, "style": style, "description": description}


def _seconds_until(
    expected: scheduling.ExpectedStart | None, now: datetime
) -> tuple[float, float | None, float | None] | None:
    if expected is None or expected.start is None:
        return None
    bounds = (
        (time - now).total_seconds() if time is not None else None
        for time in (expected.earliest, expected.latest)
    )
    low, high = bounds
    return (expected.start - now).total_seconds(), low, high
