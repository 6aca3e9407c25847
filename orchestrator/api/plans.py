"""Plans: estimate, search, export, save."""

from __future__ import annotations

from typing import Annotated, Any

from django.http import HttpRequest, HttpResponse
from ninja import Router
from pydantic import ConfigDict, Field

from orchestrator.api.http.auth import require_scope, user
from orchestrator.api.http.idempotency import creates
from orchestrator.api.http.lookup import get_saved_plan
from orchestrator.api.http.pagination import paginated
from orchestrator.api.http.problems import Invalid
from orchestrator.api.http.responses import gzip_if_large, json_response
from orchestrator.api.schemas.plans import (
    EstimateOut,
    ExportOut,
    SavedPlanOut,
    SearchOut,
    ServingOut,
)
from orchestrator.planner import user_api
from orchestrator.planner.plan_request import BadRequest
from orchestrator.planner.request_parsing import nest_flat_fields
from orchestrator.planner.store import selectors, services
from workers.contracts.base import Contract

router = Router(tags=["planner"])
MAX_LINES = 2000

Model = Annotated[
    Any,
    Field(description="a preset's name, a ModelSpec, or the content of a Hugging Face config.json"),
]
Cluster = Annotated[
    dict[str, Any] | None,
    Field(description="a ClusterSpec; `device` may be a user-defined name or a Device object"),
]
Framework = Annotated[
    dict[str, Any] | str | None, Field(description="its name, or {name, switches…}")
]
Workload = Annotated[
    dict[str, Any] | None,
    Field(description="{seq_len, tokens?, global_batch_size?, trained_share?}"),
]
CalibrationId = Annotated[
    int | str | None,
    Field(
        description=(
            'id or name; default: the device\'s default calibration; "none": no calibration'
        )
    ),
]
Explain = Annotated[
    bool | str | list[str],
    Field(
        description="true: a tree {name, value, unit, formula, inputs, source} for every number, "
        "2 MB "
        "per plan; the name of one number or a list: their trees under `explained`"
    ),
]
ExplainDepth = Annotated[
    int | None, Field(description="levels of the trees; default: down to the inputs")
]


class PlanRequest(Contract):
    """Model, cluster and workload of a plan.

    `source` and keys that start with `_` are ignored; other unknown keys are refused by name.
    """

    model_config = ConfigDict(extra="allow")

    model: Model = None
    cluster: Cluster = None
    workload: Workload = None
    framework: Framework = None
    calibration: CalibrationId = None
    explain: Explain = False
    explain_depth: ExplainDepth = None


class Estimate(PlanRequest):
    """One request line, or a list under `requests`."""

    id: Any = None
    plan: Annotated[Any, Field(description='a ParallelPlan, or "auto"')] = None
    requests: Annotated[list[Any] | None, Field(max_length=MAX_LINES)] = None


class Search(PlanRequest):
    """A search request."""

    fix: Annotated[
        dict[str, Any] | None,
        Field(description="fixed fields of the plan: {tp: 8, zero: [1, 3]}"),
    ] = None
    objective: Annotated[str | None, Field(description="time, cost, memory or devices")] = None
    top: Annotated[int | None, Field(ge=1, le=200, description="number of plans to return")] = None


class Export(PlanRequest):
    """An export request."""

    plan: Annotated[Any, Field(description='a ParallelPlan, or "auto"')] = None
    engine: Annotated[str, Field(description="torchtitan, megatron, deepspeed or accelerate")]


class Serving(Contract):
    """A serving estimate request."""

    model_config = ConfigDict(extra="allow")

    model: Model = None
    cluster: Cluster = None


class NewSavedPlan(Contract):
    """A plan to save."""

    name: Annotated[str, Field(min_length=1, max_length=160)]
    line: Annotated[dict[str, Any], Field(description="a request line")]
    link: Annotated[str, Field(max_length=2000, description="the planner page that shows it")] = ""


@router.post(
    "/estimate",
    response=EstimateOut,
    auth=require_scope("read"),
    summary="Estimate plans",
)
def estimate(request: HttpRequest, body: Estimate) -> HttpResponse:
    """Predicts memory, step time and cost of a plan.

    An unreadable request is 422; an illegal plan returns `ok: false`. With `requests`, returns
    `{"answers": [...]}` in the same order; each request is answered on its own.
    """
    lines = [_line(body)] if body.requests is None else body.requests
    try:
        answers = user_api.estimate(
            user=user(request),
            lines=lines,
            calibration=body.calibration,
            explain=body.explain,
            explain_depth=body.explain_depth,
            strict=body.requests is None,
        )
    except BadRequest as error:
        raise Invalid(error.problems) from None
    return gzip_if_large(
        request, json_response(answers[0] if body.requests is None else {"answers": answers})
    )


@router.post("/search", response=SearchOut, auth=require_scope("read"), summary="Search for plans")
def search(request: HttpRequest, body: Search) -> HttpResponse:
    """Finds the best of all legal plans.

    `pareto` lists positions in `plans` on the Pareto front. The command's options (`device`,
    `nodes`, `devices_per_node`, `seq_len`, `global_batch`, `tokens`) are accepted as keys.
    """
    try:
        result = user_api.search(
            user=user(request),
            request=nest_flat_fields(_line(body)),
            calibration=body.calibration,
            explain=body.explain,
            explain_depth=body.explain_depth,
        )
    except BadRequest as error:
        raise Invalid(error.problems) from None
    return gzip_if_large(request, json_response(result))


@router.post(
    "/export",
    response=ExportOut,
    auth=require_scope("read"),
    summary="Export a plan",
)
def export(request: HttpRequest, body: Export) -> HttpResponse:
    """Returns the plan in the configuration format of another engine."""
    line = _line(body)
    engine = line.pop("engine")
    try:
        return json_response(user_api.export(user=user(request), line=line, engine=engine))
    except BadRequest as error:
        raise Invalid(error.problems) from None


@router.post(
    "/serving",
    response=ServingOut,
    auth=require_scope("read"),
    summary="Estimate serving",
)
def serving(request: HttpRequest, body: Serving) -> HttpResponse:
    """Predicts KV cache, time to first token, time per token, tokens/s and maximum concurrency."""
    try:
        return json_response(
            user_api.serving(user=user(request), request=body.model_dump(exclude_unset=True))
        )
    except BadRequest as error:
        raise Invalid(error.problems) from None


@router.get(
    "",
    response=list[SavedPlanOut],
    auth=require_scope("read"),
    summary="List saved plans",
)
@paginated(name="plans", serialize=selectors.serialize_saved_plan, newest_first=True)
def plan_list(request: HttpRequest) -> Any:
    """Saved plans that you may see, newest first."""
    return selectors.saved_plans_visible_to(user=user(request))


@router.post("", response={201: SavedPlanOut}, auth=require_scope("runs"), summary="Save a plan")
@creates(SavedPlanOut, location="/api/v1/plans/{id}")
def plan_save(request: HttpRequest, body: NewSavedPlan) -> Any:
    """Saves a request line under a name."""
    by = user(request)
    saved = services.plan_save(
        by=by,
        name=body.name,
        line=body.line,
        link=body.link,
        devices=selectors.own_devices(user=by),
    )
    return selectors.serialize_saved_plan(saved)


@router.get(
    "/{int:id}", response=SavedPlanOut, auth=require_scope("read"), summary="Get a saved plan"
)
def plan(request: HttpRequest, id: int) -> Any:
    """One saved plan."""
    return selectors.serialize_saved_plan(get_saved_plan(request, id))


@router.delete(
    "/{int:id}", response={204: None}, auth=require_scope("runs"), summary="Delete a saved plan"
)
def plan_delete(request: HttpRequest, id: int) -> HttpResponse:
    """Deletes the saved plan."""
    services.plan_delete(plan=get_saved_plan(request, id), by=user(request))
    return HttpResponse(status=204)


def _line(body: Contract) -> dict[str, Any]:
    line = body.model_dump(exclude_unset=True)
    for key in ("calibration", "explain", "explain_depth", "requests"):
        line.pop(key, None)
    return line
