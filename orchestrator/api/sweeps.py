"""Sweeps: start, list, get, cancel. Team members see them; owners and operators cancel."""

from __future__ import annotations

from typing import Annotated, Any

from django.http import HttpRequest
from ninja import Router, Schema
from pydantic import Field

from orchestrator.api.http.auth import require_scope, user
from orchestrator.api.http.idempotency import creates
from orchestrator.api.http.lookup import get_experiment, get_sweep
from orchestrator.api.http.pagination import paginated
from orchestrator.api.schemas.base import Id, Time
from orchestrator.sweeps import selectors, services
from orchestrator.sweeps.definition import SweepDefinition

router = Router(tags=["sweeps"])


class NewSweep(SweepDefinition):
    """A sweep to start."""

    name: Annotated[str, Field(min_length=1, max_length=120)]
    experiment: Annotated[
        int | str | None, Field(description="name or id; a new name creates the experiment")
    ] = None


class TrialOut(Schema):
    """One point of a sweep."""

    number: int
    run: Id | None
    run_state: str | None
    parent: int | None = Field(description="number of the trial whose checkpoint it continues")
    parameters: dict[str, Any] = Field(description="value by path in the spec")
    state: str = Field(description="running, paused, finished, stopped, failed or refused")
    message: str
    value: float | None = Field(description="of the metric; null: none, or not a finite number")
    step: int = Field(description="of the value")
    results: list[float | None] = Field(description="values at the rungs of ASHA, intervals of PBT")
    created: Time
    ended: Time | None


class SweepOut(Schema):
    """A sweep without its trials."""

    id: Id
    name: str
    owner: str
    experiment: str | None
    state: str = Field(description="running, finished, failed or cancelled")
    message: str = Field(description="why it ended")
    method: str
    metric: dict[str, Any]
    budget: dict[str, Any] = Field(description="runs and device_hours at most")
    created: Time
    ended: Time | None


class UsedOut(Schema):
    """How much of the budget is used."""

    runs: int
    device_hours: float


class SweepDetailOut(SweepOut):
    """A sweep with its trials and results."""

    definition: dict[str, Any]
    used: UsedOut
    best: TrialOut | None
    importance: dict[str, Any] = Field(
        description="method, and the share of each parameter in reaching good values"
    )
    trials: list[TrialOut]


@router.post(
    "", response={201: SweepDetailOut}, auth=require_scope("runs"), summary="Start a sweep"
)
@creates(SweepDetailOut, location="/api/v1/sweeps/{id}")
def sweep_create(request: HttpRequest, body: NewSweep) -> Any:
    """Checks definition and spec, and starts the first runs within seconds.

    `parameters` are named by their paths in the spec: `{"train.optimizer.lr": {"min": 1e-4, "max":
    0.1, "scale": "log"}, "train.seed": {"values": [1, 2]}}`. 422 names every wrong field.
    """
    experiment: Any = body.experiment
    if isinstance(experiment, int):
        experiment = get_experiment(request, experiment)
    definition = SweepDefinition.from_dict(
        body.model_dump(mode="json", exclude={"name", "experiment"}, exclude_none=True)
    )
    sweep = services.sweep_create(
        owner=user(request), name=body.name, definition=definition, experiment=experiment or None
    )
    return selectors.serialize_sweep_with_trials(sweep)


@router.get("", response=list[SweepOut], auth=require_scope("read"), summary="List sweeps")
@paginated(name="sweeps", newest_first=True, serialize=selectors.serialize_sweep)
def sweep_list(request: HttpRequest, state: str | None = None) -> Any:
    """Sweeps that you may see, newest first."""
    rows = selectors.sweeps_visible_to(user=user(request))
    return rows.filter(state=state) if state else rows


@router.get("/{int:id}", response=SweepDetailOut, auth=require_scope("read"), summary="Get a sweep")
def sweep_detail(request: HttpRequest, id: int) -> Any:
    """One sweep with its trials, the best so far, the used budget and importance."""
    return selectors.serialize_sweep_with_trials(get_sweep(request, id))


@router.post(
    "/{int:id}/cancel",
    response=SweepDetailOut,
    auth=require_scope("runs"),
    summary="Cancel a sweep",
)
def sweep_cancel(request: HttpRequest, id: int) -> Any:
    """Ends the sweep and cancels its runs. Cancelling twice has no effect."""
    cancelled = services.sweep_cancel(sweep=get_sweep(request, id), by=user(request))
    return selectors.serialize_sweep_with_trials(cancelled)
