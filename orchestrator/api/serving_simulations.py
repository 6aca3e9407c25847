"""Simulation of a server under load."""

from __future__ import annotations

from typing import Annotated, Any

from django.http import HttpRequest, HttpResponse
from ninja import Router, Schema
from pydantic import ConfigDict, Field

from orchestrator.api.http.auth import require_scope, user
from orchestrator.api.http.lookup import get_run
from orchestrator.api.http.problems import Invalid
from orchestrator.api.http.responses import json_response
from orchestrator.api.plans import Cluster, Model
from orchestrator.planner import user_api
from orchestrator.planner.plan_request import BadRequest
from orchestrator.planner.serving.simulation.load import Load
from orchestrator.planner.serving.simulation.request import Disaggregated, LatencyLimits, Rate
from orchestrator.runs.serving.deployment import served_deployment
from workers.contracts.base import Contract
from workers.contracts.specs.model import Positive
from workers.contracts.wire.serving_reports import StepCosts

router = Router(tags=["planner"])


class ServingSimulation(Contract):
    """A deployment and its load; fields of `plans/serving` describe the deployment."""

    model_config = ConfigDict(extra="allow")

    run: Annotated[
        int | None,
        Field(
            description="a serve run: its model, layout, limits and measured step costs are the "
            "defaults of the other fields"
        ),
    ] = None
    model: Model = None
    cluster: Cluster = None
    load: Load
    max_batch_tokens: Positive | None = None
    max_seqs: Positive | None = None
    kv_blocks: Positive | None = None
    step_costs: StepCosts | None = None
    limits: LatencyLimits | None = None
    disaggregated: Disaggregated | None = None
    rates: Annotated[list[Rate], Field(max_length=12)] = []


class Spread(Schema):
    """Seconds over all requests."""

    mean: float
    p50: float
    p90: float
    p99: float


class ServingSimulationOut(Schema):
    """Simulated latency, throughput and queues."""

    model_config = ConfigDict(extra="allow")

    requests: int
    seconds: float = Field(description="from the first arrival to the last token")
    requests_per_s: float
    tokens_per_s: float = Field(description="output tokens of all replicas")
    ttft_s: Spread = Field(description="arrival to first token")
    tpot_s: Spread | None = Field(description="each further token; null for answers of one token")
    latency_s: Spread = Field(description="arrival to last token")
    queue_s: Spread = Field(description="arrival to admission")
    step_s: float = Field(description="mean duration of an engine step")
    running: dict[str, float] = Field(description="{mean, max} requests in a step")
    waiting: dict[str, float]
    cache_use: dict[str, float] = Field(description="share of the cache blocks in use")
    preemptions: int
    time: dict[str, float] = Field(description="shares of prefill steps, decode steps and idle")
    capacity: float = Field(description="requests/s of the deployment while it is full")
    saturated: bool = Field(description="the load's rate is above the capacity: queues grow")
    step_times: str = Field(description="measured or predicted")
    by_rate: list[dict[str, Any]] = Field([], description="one per entry of `rates`")
    search: dict[str, Any] | None = Field(
        None, description="{rate, replicas, devices, usd_per_hour, rows} within `limits`"
    )


@router.post(
    "/simulate",
    response=ServingSimulationOut,
    auth=require_scope("read"),
    summary="Simulate serving under load",
)
def simulate(request: HttpRequest, body: ServingSimulation) -> HttpResponse:
    """Simulates the engine's scheduler: latency percentiles, throughput, and the largest rate."""
    values = body.model_dump(exclude_unset=True, exclude_none=True, exclude={"run"})
    try:
        if body.run is not None:
            run = get_run(request, body.run)
            values = {**served_deployment(run=run), **values}
        return json_response(user_api.simulate_serving(user=user(request), request=values))
    except BadRequest as error:
        raise Invalid(error.problems) from None
