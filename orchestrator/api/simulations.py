"""Simulations: scheduling policies compared on a trace, run in the background."""

from __future__ import annotations

from typing import Annotated, Any

from django.http import HttpRequest, HttpResponse
from ninja import Router, Schema
from pydantic import Field

from orchestrator.api.http.auth import require_scope, user
from orchestrator.api.http.idempotency import creates
from orchestrator.api.http.pagination import paginated
from orchestrator.api.schemas.base import Id, Time
from orchestrator.background_jobs.simulations import requests
from workers.contracts.base import Contract

router = Router(tags=["fleet"])


class NewSimulation(Contract):
    """What to simulate."""

    trace: Annotated[str, Field(min_length=1, max_length=120)] = Field(
        description="philly:RUNS:SEED, helios:RUNS:SEED, or the name of the CSV text"
    )
    csv: Annotated[str, Field(max_length=requests.MOST_CSV_BYTES)] = Field(
        "", description="columns submit_s, user, team, devices, duration_s, priority"
    )
    nodes: Annotated[int, Field(ge=1)]
    devices_per_node: Annotated[int, Field(ge=1)] = 8
    policies: list[str] = Field(
        default=["fifo", "shortest_first", "fair_share", "orrery"], max_length=10
    )


class PolicyFigures(Schema):
    """Figures of one policy; docs/scheduling.md defines them."""

    mean_wait_s: float
    p95_wait_s: float
    mean_completion_s: float
    utilization: float
    fragmentation: float
    fairness: float
    starved: int
    lost_device_h: float | None = Field(
        None, description="of restarts for another size; null for policies without elastic runs"
    )


class SimulationOut(Schema):
    """A simulation."""

    id: Id
    trace: str
    runs: int
    nodes: int
    devices_per_node: int
    state: str = Field(description="queued, done or failed")
    created: Time
    finished: Time | None
    seconds: float | None
    policies: dict[str, PolicyFigures | None]
    error: str


@router.get(
    "", response=list[SimulationOut], auth=require_scope("read"), summary="List simulations"
)
@paginated(name="simulations", newest_first=True, serialize=requests.serialize_simulation)
def simulation_list(request: HttpRequest) -> Any:
    """The caller's simulations, newest first."""
    return requests.simulations_of(user=user(request))


@router.post(
    "", response={201: SimulationOut}, auth=require_scope("read"), summary="Simulate policies"
)
@creates(SimulationOut)
def simulation_create(request: HttpRequest, body: NewSimulation) -> dict[str, Any]:
    """Queues a comparison of scheduling policies on a trace."""
    row = requests.simulation_request(
        by=user(request),
        trace=body.trace,
        csv=body.csv,
        nodes=body.nodes,
        devices_per_node=body.devices_per_node,
        policies=body.policies,
    )
    return requests.serialize_simulation(row)


@router.get(
    "/{int:id}", response=SimulationOut, auth=require_scope("read"), summary="Get a simulation"
)
def simulation(request: HttpRequest, id: int) -> Any:
    """One simulation of the caller."""
    return requests.serialize_simulation(requests.simulation_get(user=user(request), id=id))


@router.delete(
    "/{int:id}", response={204: None}, auth=require_scope("read"), summary="Delete a simulation"
)
def simulation_remove(request: HttpRequest, id: int) -> HttpResponse:
    """Deletes the simulation."""
    requests.simulation_delete(simulation=requests.simulation_get(user=user(request), id=id))
    return HttpResponse(status=204)
