"""What every tab of a run's page shares: the run, its newest numbers, its events, its headline. At
most seven queries.

Knows selectors of runs and telemetry; knows no markup.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any, Final

from orchestrator.common import clock, live
from orchestrator.runs import selectors as runs
from orchestrator.runs import services
from orchestrator.runs.outputs import endpoint, evaluation_results, generated_answers
from orchestrator.telemetry import selectors as telemetry
from webui.charts.axes import per_step
from webui.presentation import event_messages as moments
from webui.presentation import formatting, run_headlines

ANSWERING: Final = ("serve", "generate", "evaluate")
EVENTS: Final = 120  # newest, in the list and on charts
SHOWN_EVENTS: Final = 30
# tabs of runs that answer
_OF_KIND: Final = {
    "chat": "serve",
    "requests": "serve",
    "cache": "serve",
    "answers": "generate",
    "evaluation": "evaluate",
}
_NUMERICS: Final = ("loss_scale", "grad_norm", "grad_underflow/", "moe/")
TAB_TITLES: Final = {
    "benchmark": "Results",
    "chat": "Chat",
    "answers": "Answers",
    "evaluation": "Results",
    "summary": "Summary",
    "requests": "Requests",
    "cache": "Cache",
    "performance": "Performance",
    "memory": "Memory",
    "numerics": "Numerics",
    "system": "System",
    "logs": "Logs",
    "checkpoints": "Checkpoints and artifacts",
    "config": "Config",
    "history": "History",
}


def read(*, user: Any, id: int) -> Facts:
    """Raises Refusal 404 for a run that is not there or not this person's to see."""
    return of(run=runs.run_get(user=user, id=id), user=user)


def of(*, run: Any, user: Any) -> Facts:
    # the topic's head is read first: points that arrive while the page is made come again as
    # frames, and count once
    epoch, seq = live.heads([f"run:{run.pk}"]).get(f"run:{run.pk}", ("", 0))
    return Facts(run=run, user=user, epoch=epoch, seq=seq, latest=telemetry.latest(run=run))


@dataclass(frozen=True)
class Facts:
    run: Any
    user: Any
    epoch: str
    seq: int
    latest: dict[str, float]

    @property
    def names(self) -> list[str]:
        return sorted(self.latest)

    @cached_property
    def moments(self) -> list[moments.Moment]:
        """Newest first."""
        found = runs.events_of(run=self.run, limit=EVENTS, newest=True, without=moments.DRAWN)
        return [moments.moment(event) for event in reversed(found)]

    @cached_property
    def per_step(self) -> dict[str, float]:
        return per_step(self.run.spec, self.run.plan)

    @property
    def plan(self) -> dict[str, Any]:
        """As resolved, else as submitted; empty where there is none or it is left open."""
        plan = self.run.plan or self.run.spec.get("plan")
        return plan if isinstance(plan, dict) else {}

    @cached_property
    def may_manage(self) -> bool:
        return services.may_manage(self.run, self.user)

    def tabs(self) -> list[tuple[str, str]]:
        """Those that have something to show for this run."""
        names, kind = self.latest, self.run.kind
        trains = kind in ("train", "script")
        # its steps are of many plans: curves of time and memory would mix them
        if kind == "benchmark":
            own = ("benchmark", "summary", "logs", "config", "history")
            return [(name, title) for name, title in TAB_TITLES.items() if name in own]
        shown = {
            **{name: kind == of for name, of in _OF_KIND.items()},
            "benchmark": False,
            "performance": trains or "step_time_s" in names or "tokens_per_s" in names,
            "memory": kind != "external" or any(name.startswith("memory/") for name in names),
            "numerics": kind == "train" or any(name.startswith(_NUMERICS) for name in names),
            "system": kind in ANSWERING or any(name.startswith("device/") for name in names),
            "checkpoints": kind not in ("external", "serve"),
        }
        return [(name, title) for name, title in TAB_TITLES.items() if shown.get(name, True)]

    def sentence(self, *, trending: bool) -> str:
        """`trending` reads the loss curve, five queries more: told by the pulse that follows each
        page at once.
        """
        run, now = self.run, clock.now()
        ended = run.ended or now
        last = run.summary.get("time")
        curve = (
            telemetry.sparkline(run_ids=[run.pk], name="loss").get(run.pk, []) if trending else []
        )
        facts = run_headlines.RunFacts(
            state=run.state,
            kind=run.kind,
            requested=run.requested,
            wait_reason=run.wait_reason,
            devices=run.devices,
            attempt=run.attempt_number,
            summary={**self.latest, **run.summary},
            exit=run.exit,
            loss_curve=curve,
            runtime_s=(ended - run.started).total_seconds() if run.started else None,
            last_point_s=now.timestamp() - last
            if isinstance(last, int | float) and run.state == "running"
            else None,
            predicted_mfu=(run.prediction or {}).get("mfu"),
            standing=self.standing.phase if self.standing is not None else "",
            answered=generated_answers.counted(run) if generated_answers.is_here(run) else None,
            metrics=self.evaluated.metrics if self.evaluated is not None else None,
        )
        return run_headlines.run_headline(facts)

    @cached_property
    def standing(self) -> endpoint.Standing | None:
        """Where a serve run answers; None for others."""
        return endpoint.standing(run=self.run) if self.run.kind == "serve" else None

    @cached_property
    def evaluated(self) -> Any:
        """What an evaluate run found, once it has; None for others."""
        return evaluation_results.evaluated(run=self.run) if self.run.kind == "evaluate" else None

    def progress(self) -> float | None:
        """A fraction of the steps asked for, or of the lines to answer."""
        if generated_answers.is_here(self.run):
            done, lines = generated_answers.counted(self.run)
            return min(1.0, done / lines) if lines else None
        step, steps = self.run.summary.get("step"), self.run.summary.get("steps")
        return min(1.0, step / steps) if step is not None and steps else None

    def head(self, *, trending: bool = False) -> dict[str, Any]:
        """The template's words for what stands above the tabs."""
        run, done = self.run, self.progress()
        return {
            "run": run,
            "plan": run.plan or run.spec.get("plan"),
            "sentence": self.sentence(trending=trending and run.state == "running"),
            "progress": f"{100 * done:.1f}" if done is not None else "",
            "actions": actions(run) if self.may_manage else [],
            "may_manage": self.may_manage,
            "moments": self.moments[:SHOWN_EVENTS],
            "more_moments": len(self.moments) > SHOWN_EVENTS,
            "marks": [
                found.mark(self.per_step) for found in self.moments if moments.on_charts(found)
            ],
            "epoch": self.epoch,
            "seq": self.seq,
            "latest": self.latest,
            "runtime": formatting.duration(
                ((run.ended or clock.now()) - run.started).total_seconds()
            )
            if run.started
            else "",
        }

    def source(self) -> dict[str, Any]:
        """What the page's script needs to fetch and place points."""
        run = self.run
        return {
            "id": run.pk,
            "name": f"run-{run.pk}",
            "series": f"/api/v1/runs/{run.pk}/series",
            "socket": f"/ws/runs/{run.pk}/",
            "epoch": self.epoch,
            "after": self.seq,
            "per_step": self.per_step,
            "names": self.names,
            "ended": run.state in run_headlines.ENDED,
        }


def actions(run: Any) -> list[dict[str, str]]:
    """What can be done now, the likeliest first: {name, label, style, says}."""
    state, ours = run.state, run.kind != "external"
    offered = []
    if state == "paused":
        offered.append(_action("resume", "Resume", "primary", "goes on from the newest checkpoint"))
    if state in ("failed", "cancelled") and ours:
        offered.append(
            _action("retry", "Retry", "primary", "queues it again, from its newest checkpoint")
        )
    if state == "running" and run.kind == "train":
        offered.append(
            _action("checkpoint", "Checkpoint now", "", "saves a checkpoint at the next step")
        )
        offered.append(
            _action(
                "profile", "Profile now", "", "torch's profiler over the next step, as artifacts"
            )
        )
        says = "what holds memory in the next step, as artifacts"
        offered.append(_action("memory-snapshot", "Memory snapshot", "", says))
    if state in ("queued", "starting", "running") and ours:
        says = (
            "ends what it has begun and leaves"
            if run.kind in ANSWERING
            else "saves a checkpoint and leaves"
        )
        offered.append(_action("pause", "Pause", "", f"{says} its devices"))
    if ours:
        offered.append(_action("clone", "Clone", "", "submits the same spec as a new run"))
    if state not in run_headlines.ENDED and not (state == "stopping" and run.requested == "cancel"):
        label, says = (
            ("Stop", "ends it; what it has begun may end")
            if run.kind == "serve"
            else ("Cancel", "ends it")
        )
        offered.append(
            _action(
                "cancel",
                label,
                "danger",
                says if run.kind in ANSWERING else f"{says}; checkpoints stay",
            )
        )
    return offered


def _action(name: str, label: str, style: str, says: str) -> dict[str, str]:
    return {"name": name, "label": label, "style": style, "says": says}
