"""The plans that a run with autotune will try, with their predictions. Writes nothing."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from workers.contracts import ParallelPlan, Problem, RunSpec
from workers.contracts.base import problem
from workers.contracts.catalog.units import format_time
from workers.contracts.specs.autotune import Autotune

_LEAST_PLANS = 2  # that the budget must allow: one plan is not a comparison


@dataclass(frozen=True)
class Candidates:
    """`plans` is `[{plan, prediction}]`, fastest first; empty without autotune or with problems.

    `seconds` the trials are predicted to take, `budget_s` they may take.
    """

    plans: list[dict[str, Any]] = field(default_factory=list)
    problems: list[Problem] = field(default_factory=list)
    seconds: float = 0.0
    budget_s: float = 0.0


def open_plan_problems(spec: RunSpec, *, automatic: bool) -> list[Problem]:
    """The problem of a run with autotune whose plan is given."""
    if spec.autotune is None or spec.kind != "train" or automatic:
        return []
    message = "the plan is given, so there is nothing to try"
    return [problem("autotune", message, 'Set plan to "auto", or leave autotune out.')]


def candidates_of(
    spec: RunSpec,
    plans: Sequence[ParallelPlan],
    *,
    predict: Callable[[ParallelPlan], dict[str, Any] | None],
    start_s: float,
) -> Candidates:
    """The candidates of a run. `start_s`: what starting its processes is predicted to take."""
    settings = spec.autotune
    if settings is None or spec.train is None:
        return Candidates()
    documents = [(plan, predict(plan)) for plan in plans]
    listed = [
        {"plan": plan.to_dict(), "prediction": document}
        for plan, document in documents
        if document is not None
    ]
    if len(listed) < _LEAST_PLANS:
        message = f"there are {len(listed) or 'no'} plans to compare on these devices"
        if len(listed) == 1:
            message = "only one plan is legal and fits on these devices"
        return Candidates(
            problems=[problem("autotune", message, "Leave autotune out, or use more devices.")]
        )
    listed.sort(key=lambda each: float(each["prediction"]["step_time_s"]))
    times = [float(each["prediction"]["step_time_s"]) for each in listed]
    budget = settings.budget_s(spec.train.steps * times[0])
    needed = start_s + sum(map(_trial_s(settings), times[:_LEAST_PLANS]))
    if needed > budget:
        return Candidates(problems=[_too_small(settings, spec.train.steps, times, budget, needed)])
    seconds = start_s + sum(map(_trial_s(settings), times))
    return Candidates(listed, seconds=min(budget, seconds), budget_s=budget)


def _trial_s(settings: Autotune) -> Callable[[float], float]:
    steps = settings.warmup_steps + settings.steps
    return lambda step_time_s: steps * step_time_s


def _too_small(
    settings: Autotune, run_steps: int, times: Sequence[float], budget: float, needed: float
) -> Problem:
    run_s = run_steps * times[0]
    by_seconds = settings.max_seconds is not None and settings.max_seconds <= budget
    message = (
        f"trials may take {format_time(budget)} "
        f"({'max_seconds' if by_seconds else f'{settings.max_share:.0%} of {format_time(run_s)}'})"
        f", two plans with {settings.warmup_steps + settings.steps} steps each and the start of "
        f"the processes take about {format_time(needed)}"
    )
    share = needed / run_s
    if by_seconds:
        return problem("autotune.max_seconds", message, f"Use {needed * 1.2:.0f}, or fewer steps.")
    hint = (
        f"Use max_share {min(0.5, 1.2 * share):.2g}."
        if share < 0.5
        else "Leave autotune out: the run is short."
    )
    return problem("autotune.max_share", message, hint)
