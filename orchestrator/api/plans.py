"""Plans: estimate them, search for the best, hand them to another engine, keep them.

The planner computes.
"""

from __future__ import annotations

from typing import Annotated, Any

from django.http import HttpRequest, HttpResponse
from ninja import Router
from pydantic import ConfigDict, Field

from orchestrator.api.http.auth import needs, user
from orchestrator.api.http.idempotency import creates
from orchestrator.api.http.lookup import saved_plan_of
from orchestrator.api.http.pagination import Page, paged_query
from orchestrator.api.http.problems import Invalid
from orchestrator.api.http.responses import json_answer, packed
from orchestrator.api.schemas import (
    EstimateOut,
    ExportOut,
    PageOf,
    SavedPlanOut,
    SearchOut,
    ServingOut,
)
from orchestrator.planner import user_api
from orchestrator.planner.requests import BadRequest, folded
from orchestrator.planner.store import selectors, services
from workers.contracts.base import Contract

router = Router(tags=["planner"])
MOST_LINES = 2000

Model = Annotated[
    Any,
    Field(description="a preset's name, a ModelSpec, or the content of a Hugging Face config.json"),
]
Cluster = Annotated[
    dict[str, Any] | None,
    Field(description="a ClusterSpec; `device` may be one of your own, or a Device written out"),
]
Framework = Annotated[
    dict[str, Any] | str | None, Field(description="its name, or {name, switches…}")
]
Workload = Annotated[
    dict[str, Any] | None, Field(description="{seq_len, tokens?, global_batch_size?}")
]
CalibrationId = Annotated[
    int | str | None,
    Field(
        description=(
            'number or name; the device\'s default one where it is left out, "none" for none'
        )
    ),
]
Explain = Annotated[
    bool | str | list[str],
    Field(
        description="true: a tree {name, value, unit, formula, inputs, source} in place of every "
        "number, 2 MB a plan; "
        "the name of a number, or several: their trees alone, under `explained`"
    ),
]
ExplainDepth = Annotated[
    int | None, Field(description="levels of the trees; left out: down to what is given")
]


class Scenery(Contract):
    """What a plan is for.

    Keys that start with `_` and `source` are ignored, other unknown keys refused by name.
    """

    model_config = ConfigDict(extra="allow")

    model: Model = None
    cluster: Cluster = None
    workload: Workload = None
    framework: Framework = None
    calibration: CalibrationId = None
    explain: Explain = False
    explain_depth: ExplainDepth = None


class Estimate(Scenery):
    """One request line, or several under `requests`."""

    id: Any = None
    plan: Annotated[Any, Field(description='a ParallelPlan, or "auto"')] = None
    requests: Annotated[list[Any] | None, Field(max_length=MOST_LINES)] = None


class Search(Scenery):
    fix: Annotated[
        dict[str, Any] | None,
        Field(description="fields of a plan that are not to be chosen: {tp: 8, zero: [1, 3]}"),
    ] = None
    objective: Annotated[str | None, Field(description="time, cost, memory or devices")] = None
    top: Annotated[int | None, Field(ge=1, le=200, description="plans to answer with")] = None


class Export(Scenery):
    plan: Annotated[Any, Field(description='a ParallelPlan, or "auto"')] = None
    engine: Annotated[str, Field(description="torchtitan, megatron, deepspeed or accelerate")]


class Serving(Contract):
    model_config = ConfigDict(extra="allow")

    model: Model = None
    cluster: Cluster = None


class NewSavedPlan(Contract):
    name: Annotated[str, Field(min_length=1, max_length=160)]
    line: Annotated[dict[str, Any], Field(description="a request line")]
    link: Annotated[str, Field(max_length=2000, description="the planner page that shows it")] = ""


@router.post(
    "/estimate", response=EstimateOut, auth=needs("read"), summary="Memory, time and cost of plans"
)
def estimate(request: HttpRequest, body: Estimate) -> HttpResponse:
    """One line is answered by its answer; what cannot be read is 422. An illegal plan is answered
    `ok: false`.

    `requests` are answered by `{"answers": [...]}` in their order, each by itself.
    """
    lines = [_line(body)] if body.requests is None else body.requests
    try:
        told = user_api.estimate(
            user=user(request),
            lines=lines,
            calibration=body.calibration,
            explain=body.explain,
            explain_depth=body.explain_depth,
            strict=body.requests is None,
        )
    except BadRequest as error:
        raise Invalid(error.problems) from None
    return packed(request, json_answer(told[0] if body.requests is None else {"answers": told}))


@router.post(
    "/search", response=SearchOut, auth=needs("read"), summary="The best of all legal plans"
)
def search(request: HttpRequest, body: Search) -> HttpResponse:
    """Enumerates, prunes, times and ranks; `pareto` are positions in `plans` that no other plan
    beats in everything.

    The command's words (`device`, `nodes`, `devices_per_node`, `seq_len`, `global_batch`, `tokens`)
    do as well.
    """
    try:
        told = user_api.search(
            user=user(request),
            request=folded(_line(body)),
            calibration=body.calibration,
            explain=body.explain,
            explain_depth=body.explain_depth,
        )
    except BadRequest as error:
        raise Invalid(error.problems) from None
    return packed(request, json_answer(told))


@router.post(
    "/export",
    response=ExportOut,
    auth=needs("read"),
    summary="A plan as another engine's configuration",
)
def export(request: HttpRequest, body: Export) -> HttpResponse:
    line = _line(body)
    engine = line.pop("engine")
    try:
        return json_answer(user_api.export(user=user(request), line=line, engine=engine))
    except BadRequest as error:
        raise Invalid(error.problems) from None


@router.post(
    "/serving", response=ServingOut, auth=needs("read"), summary="What serving a model would reach"
)
def serving(request: HttpRequest, body: Serving) -> HttpResponse:
    """KV cache, time to first token, time per token, tokens per second, largest concurrency."""
    try:
        return json_answer(
            user_api.serving(user=user(request), request=body.model_dump(exclude_unset=True))
        )
    except BadRequest as error:
        raise Invalid(error.problems) from None


@router.get(
    "", response=PageOf[SavedPlanOut], auth=needs("read"), summary="Saved plans, newest first"
)
def plan_list(request: HttpRequest, page: Page) -> dict[str, Any]:
    rows = selectors.saved_plans_visible_to(user=user(request))
    return paged_query(rows, page, "plans", selectors.saved_plan_answer, newest_first=True)


@router.post(
    "", response={201: SavedPlanOut}, auth=needs("runs"), summary="Keep a plan under a name"
)
@creates(SavedPlanOut, location="/api/v1/plans/{id}")
def plan_save(request: HttpRequest, body: NewSavedPlan) -> Any:
    who = user(request)
    made = services.plan_save(
        by=who,
        name=body.name,
        line=body.line,
        link=body.link,
        devices=selectors.own_devices(user=who),
    )
    return selectors.saved_plan_answer(made)


@router.get("/{int:id}", response=SavedPlanOut, auth=needs("read"), summary="One saved plan")
def plan(request: HttpRequest, id: int) -> Any:
    return selectors.saved_plan_answer(saved_plan_of(request, id))


@router.delete("/{int:id}", response={204: None}, auth=needs("runs"), summary="Forget a saved plan")
def plan_delete(request: HttpRequest, id: int) -> HttpResponse:
    services.plan_delete(plan=saved_plan_of(request, id), by=user(request))
    return HttpResponse(status=204)


def _line(body: Contract) -> dict[str, Any]:
    found = body.model_dump(exclude_unset=True)
    for key in ("calibration", "explain", "explain_depth", "requests"):
        found.pop(key, None)
    return found
