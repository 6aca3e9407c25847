"""GET runs/{id}/plan-trials: the plans that a run with autotune tried, predicted and measured."""

from __future__ import annotations

from typing import Any, Literal

from django.http import HttpRequest
from ninja import Router, Schema
from pydantic import Field

from orchestrator.api.http.auth import require_scope
from orchestrator.api.http.lookup import get_run
from orchestrator.api.http.problems import invalid
from orchestrator.api.schemas.base import Time
from orchestrator.common.units import iso
from orchestrator.runs.plan_trials.table import trials_of

router = Router(tags=["runs"])


class PlanTrialRow(Schema):
    """One plan: its rank by predicted step time, and what trials measured."""

    rank: int = Field(description="by predicted step time, from 1")
    plan: dict[str, Any]
    state: Literal["waiting", "trying", "measured", "slower", "failed", "not_tried"] = Field(
        description="slower: its trial ended early; not_tried: the budget was used up before"
    )
    chosen: bool
    predicted_s: float = Field(description="predicted step time")
    predicted_low_s: float | None = Field(description="80% interval")
    predicted_high_s: float | None
    predicted_bytes: float = Field(description="predicted peak of allocated memory per device")
    step_time_s: float | None = Field(None, description="median of the timed steps")
    low_s: float | None = Field(None, description="first quartile")
    high_s: float | None = Field(None, description="third quartile")
    measured_rank: int | None = Field(None, description="by measured step time, from 1")
    steps: int = Field(description="timed steps of all its trials")
    visits: int = Field(description="its trials")
    peak_bytes: float | None = Field(
        None, description="of the rank with the highest peak; on a CPU, the sum of its tensors"
    )
    seconds: float = Field(description="that its trials took, including set-up")
    message: str = Field(description="why it failed")
    exit_class: str | None = None


class PlanTrialsOut(Schema):
    """The trials of a run. `chosen` and `current` are ranks."""

    rows: list[PlanTrialRow]
    settings: dict[str, Any] = Field(
        description="autotune with defaults", json_schema_extra={"x-contract": "Autotune"}
    )
    chosen: int | None
    current: int | None = Field(description="the plan that is tried now")
    reason: str = Field(description="why it was chosen, in one sentence")
    spent_s: float = Field(description="seconds of all trials, over all attempts")
    nodes: list[str]
    decided: Time | None


@router.get(
    "/{int:id}/plan-trials",
    response=PlanTrialsOut,
    auth=require_scope("read"),
    summary="Get the trials of plans",
)
def plan_trials(request: HttpRequest, id: int) -> Any:
    """The plans in the order of predictions. Runs without autotune have none: 422."""
    run = get_run(request, id)
    table = trials_of(run=run)
    if table is None:
        raise invalid("id", f"run {run.pk} tries no plans", "Choose a run with autotune.")
    return {**table, "decided": iso(table["decided"])}
