"""Trials of plans before a run: the order to a node, results, and events that supervisors report.

A result replaces earlier ones of the same plan. Does not decide what is tried next.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated, Any, Final, Literal

from pydantic import Field

from workers.contracts.base import WireContract
from workers.contracts.specs.model import Count, Positive

# events of a supervisor: an attempt begins to try plans, a trial starts, a plan was measured or
# failed, a plan was chosen
BEGAN: Final = "plan_trials_began"
TRIAL_BEGAN: Final = "plan_trial_began"
TRIAL: Final = "plan_trial"
CHOSEN: Final = "plan_chosen"
EVENTS: Final = (BEGAN, TRIAL_BEGAN, TRIAL, CHOSEN)

Seconds = Annotated[float, Field(ge=0)]


class TrialCandidate(WireContract):
    """A plan to try; `index` counts candidates from 0 by their predicted step time."""

    index: Count
    plan: dict[str, Any]
    step_time_s: Annotated[float, Field(gt=0)]  # predicted


class TrialResult(WireContract):
    """What trials of one plan measured.

    `step_time_s` is the median of `steps` timed steps over `visits` trials, `low_s` and `high_s`
    their quartiles. `slower`: stopped early because it was clearly slower than the fastest one.
    """

    index: Count
    state: Literal["measured", "slower", "failed"]
    step_time_s: Annotated[float, Field(gt=0)] | None = None
    low_s: Seconds | None = None
    high_s: Seconds | None = None
    steps: Count = 0
    visits: Count = 0
    peak_bytes: Seconds | None = None
    seconds: Seconds = 0.0  # that its trials took, including set-up
    exit_class: str | None = None  # of a failed one
    message: Annotated[str, Field(max_length=1000)] = ""


class TrialsOrder(WireContract):
    """Try these plans; results and seconds of earlier attempts count.

    `run_steps` are the steps of the run, of whose time trials may take `max_share`.
    `interrupted`: how many attempts ended during a trial of a plan, by its index.
    """

    candidates: Annotated[list[TrialCandidate], Field(min_length=1)]
    steps: Positive
    warmup_steps: Count
    run_steps: Positive
    max_share: Annotated[float, Field(gt=0)]
    max_seconds: Annotated[float, Field(gt=0)] | None = None
    results: list[TrialResult] = []
    spent_s: Seconds = 0.0
    interrupted: dict[int, Count] = {}


class TrialsState(WireContract):
    """The state of an attempt's trials, in a file of each node.

    `current`: the plan of the running trial. `ended` says why no further plan is tried.
    """

    results: list[TrialResult] = []
    current: Count | None = None
    spent_s: Seconds = 0.0
    ended: str = ""


def fastest(results: Iterable[TrialResult]) -> TrialResult | None:
    """The plan with the smallest measured step time; the better predicted one of equals."""
    timed = [each for each in results if each.state != "failed" and each.step_time_s is not None]
    return min(timed, key=lambda each: (each.step_time_s or 0.0, each.index), default=None)
