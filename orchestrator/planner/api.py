"""Public functions of the planner: estimates, search, serving, its simulation, and export.

Does not depend on Django, formulas or storage, and reads only files that a request names.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

from orchestrator.planner import request_parsing
from orchestrator.planner.answers import answer_requests, answer_table, refusal
from orchestrator.planner.explain import ExplainOptions
from orchestrator.planner.interchange import KINDS, Exported, Inexpressible
from orchestrator.planner.interchange import export as export_plan
from orchestrator.planner.model.parameters import columns_for
from orchestrator.planner.model.time.intervals import extrapolations
from orchestrator.planner.plan_request import BadRequest, ParsedLine, ParseOptions, Scenario
from orchestrator.planner.search.advice.advise import advise_search
from orchestrator.planner.search.auto_plan import choose_plan
from orchestrator.planner.search.axes import divisors
from orchestrator.planner.search.device_splits import leaves_split_open, search_splits
from orchestrator.planner.search.plan_notes import notes_on_ranking
from orchestrator.planner.search.rank_plans import SearchResult, rank_plans
from orchestrator.planner.search.search_request import parse_search_request
from orchestrator.planner.serving.answer import serving as answer_serving
from orchestrator.planner.serving.simulation.answer import (
    SIMULATION_FIELDS,
    Unanswerable,
)
from orchestrator.planner.serving.simulation.answer import simulate_serving as answer_simulation
from workers.contracts.base import Problem, Refused, problem
from workers.contracts.specs.cluster import ClusterSpec
from workers.contracts.specs.plan import ParallelPlan

if TYPE_CHECKING:
    from orchestrator.planner.model.calibration_result import Calibration

_MAX_SERVING_TP = 64


def parse_line(
    line: Any, options: ParseOptions | None = None, calibration: Calibration | None = None
) -> ParsedLine:
    """Parses one request line and resolves an "auto" plan. Does not raise for bad input."""
    try:
        choose = partial(choose_plan, calibration=calibration)
        return request_parsing.parse_line(line, options, choose)
    except RecursionError:
        return ParsedLine(problems=[request_parsing.nesting_problem()])


def estimate(
    lines: Iterable[Any],
    *,
    calibration: Calibration | None = None,
    explain: ExplainOptions | None = None,
    options: ParseOptions | None = None,
) -> list[dict[str, Any]]:
    """One answer line per request line, in their order. Does not raise for bad input.

    A line is a JSON object, the Problem of a line that could not be read, or a ParsedLine.
    """
    parsed = [
        line if isinstance(line, ParsedLine) else parse_line(line, options, calibration)
        for line in lines
    ]
    legal = [line.request for line in parsed if line.request is not None]
    answers = iter(answer_requests(legal, calibration, explain))
    return [
        refusal(line.id, line.problems)
        if line.request is None
        else {**next(answers), "id": line.id}
        for line in parsed
    ]


def search(
    request: Any,
    *,
    calibration: Calibration | None = None,
    explain: ExplainOptions | None = None,
    options: ParseOptions | None = None,
    front: bool = False,
) -> dict[str, Any]:
    """Ranks all legal plans; adds `closest` and `advice` if no plan fits.

    `request` is `{model, cluster, workload {seq_len, global_batch_size, tokens?}, framework?, fix?,
    objective?, top?}`. `top` limits the plans of the answer; without it, or with `front`, the
    Pareto front follows the ranked plans. With `rollout.devices` "auto" the cluster's devices are
    split between training and rollouts: the plans are those of the fastest split, and `splits` has
    the best plan of each. Raises BadRequest with a problem for each wrong field.
    """
    if leaves_split_open(request):
        cluster, _device, problems = request_parsing.parse_cluster(
            request.get("cluster"), (options or ParseOptions()).devices
        )
        if cluster is None or problems:
            raise BadRequest(problems)
        again = partial(
            search, calibration=calibration, explain=explain, options=options, front=front
        )
        return search_splits(request, cluster, again)
    started = time.perf_counter()
    query = parse_search_request(request, options or ParseOptions(), explained=explain is not None)
    scenario = query.scenario
    try:
        result = rank_plans(
            scenario,
            fix=query.fix,
            parameters=columns_for([scenario.request(ParallelPlan())], calibration),
            objective=query.objective,
            top=query.top,
        )
    except Refused as error:
        problems = [Problem(field=error.field, message=error.message, hint=error.hint)]
        raise BadRequest(problems) from None
    limit = query.top if explain or (query.top_given and not front) else None
    answer: dict[str, Any] = {
        "enumerated": result.enumerated,
        "legal": result.legal,
        "fit": result.fit,
        "seconds": 0.0,
        "plans": _ranked_answers(scenario, result, limit, calibration, explain),
        "pareto": [index for index in result.pareto if limit is None or index < limit],
        "rejected": result.rejected,
        "notes": [
            *result.notes,
            *notes_on_ranking(result.requests[: query.top], result.table),
            *_extrapolation_note(result, calibration),
        ],
        "problems": [item.model_dump(by_alias=True) for item in result.problems],
    }
    if result.closest is not None:
        [closest] = answer_requests([result.closest], calibration)
        answer["closest"] = {"plan": result.closest.plan.to_dict(), **closest}
        advice = advise_search(scenario, query.fix, calibration)
        answer["advice"] = [change.to_dict() for change in advice]
    answer["seconds"] = round(time.perf_counter() - started, 6)
    return answer


def serving(
    request: Any, *, explain: bool = False, options: ParseOptions | None = None
) -> dict[str, Any]:
    """Memory, TTFT, TPOT, tokens/s and concurrency of serving a model. Raises BadRequest."""
    id, values = _parse_serving(request, options or ParseOptions())
    answer = answer_serving(values, explained=explain)
    if not answer["ok"]:
        raise BadRequest([Problem.model_validate(item) for item in answer["problems"]])
    return {"id": id, **answer}


def simulate_serving(request: Any, *, options: ParseOptions | None = None) -> dict[str, Any]:
    """Latency percentiles, throughput and queues under a load, by simulation of the scheduler.

    A serving request with `load` (see `serving.simulation.load.Load`) and optional fields of
    `serving.simulation.request.SimulationRequest`. Raises BadRequest.
    """
    id, values = _parse_serving(request, options or ParseOptions())
    own = {name: values.pop(name) for name in SIMULATION_FIELDS if name in values}
    if "load" not in own:
        raise BadRequest([problem("load", "a simulation requires a load", 'Use {"rate": 2}.')])
    try:
        return {"id": id, **answer_simulation({**own, "serving": values})}
    except Unanswerable as error:
        raise BadRequest(
            [
                item.model_copy(update={"field": item.field.removeprefix("serving.")})
                for item in error.problems
            ]
        ) from None


def _parse_serving(request: Any, options: ParseOptions) -> tuple[Any, dict[str, Any]]:
    """`(id, values)` with model, cluster, device and a layout. Raises BadRequest."""
    if not isinstance(request, Mapping):
        message = "a serving request is a JSON object"
        raise BadRequest([problem("", message, 'Use {"model": "llama3-8b", ...}.')])
    request = request_parsing.strip_comments(request)
    model, problems = request_parsing.parse_model(request.get("model"), files=options.files)
    cluster, device, more = request_parsing.parse_cluster(request.get("cluster"), options.devices)
    problems += more
    if "device" in request:
        problems += request_parsing.unknown_key_problems({"device": 0}, ("cluster.device",))
    if model is None or cluster is None or problems:
        raise BadRequest(problems)
    values = {key: value for key, value in request.items() if key not in ("id", "source")}
    values |= {"model": model, "cluster": cluster, "device": device}
    if not {"tp", "pp", "replicas"} & values.keys():
        layout = {key: value for key, value in values.items() if key not in SIMULATION_FIELDS}
        values |= _smallest_serving_layout(layout, cluster)
    return request.get("id"), values


def export(
    line: Any,
    kind: str,
    *,
    calibration: Calibration | None = None,
    options: ParseOptions | None = None,
) -> Exported:
    """The plan of a request line as a configuration of the engine `kind` (one of KINDS).

    Raises BadRequest for an invalid line and for a plan that the engine cannot run.
    """
    parsed = parse_line(line, options, calibration)
    request = parsed.request
    if request is None:
        raise BadRequest(parsed.problems)
    steps = None
    if request.tokens:
        step_tokens = request.plan.global_batch_size * request.seq_len
        steps = max(1, math.ceil(request.tokens / step_tokens))
    try:
        return export_plan(
            kind,
            model=request.model,
            plan=request.plan,
            cluster=request.cluster.model_copy(update={"device": request.entry.name}),
            seq_len=request.seq_len,
            steps=steps,
        )
    except Inexpressible as error:
        field = "plan" if kind in KINDS else "engine"
        raise BadRequest([problem(field, error.message, error.hint)]) from None


def _ranked_answers(
    scenario: Scenario,
    result: SearchResult,
    limit: int | None,
    calibration: Calibration | None,
    explain: ExplainOptions | None,
) -> list[dict[str, Any]]:
    """The answers of the first `limit` plans, best first; the id of each is its rank."""
    if result.table is None:
        return []
    requests = result.requests[:limit]
    table = result.table.take(slice(0, len(requests)))
    answers = answer_table(table, requests, calibration, explain)
    plans = []
    for rank, (request, answer) in enumerate(zip(requests, answers, strict=True), 1):
        plan = {"plan": request.plan.to_dict(), **answer, "id": str(rank)}
        if request.cluster.devices != scenario.cluster.devices:
            plan["cluster"] = {**request.cluster.to_dict(), "device": request.entry.name}
        plans.append(plan)
    return plans


def _extrapolation_note(result: SearchResult, calibration: Calibration | None) -> list[str]:
    """A note if the time of the best plan is extrapolated."""
    if result.table is None or not result.requests:
        return []
    notes = extrapolations(result.table.take(slice(0, 1)), result.requests[:1], calibration)
    return [f"Number 1: {note[0].lower()}{note[1:]}" for note in notes if note]


def _smallest_serving_layout(values: Mapping[str, Any], cluster: ClusterSpec) -> dict[str, int]:
    """The fewest devices of a node that hold the model, with replicas on the other devices."""
    best = {}
    for tp in (tp for tp in divisors(cluster.devices_per_node) if tp <= _MAX_SERVING_TP):
        layout = {"tp": tp, "replicas": cluster.devices // tp}
        answer = answer_serving({**values, **layout})
        if answer["ok"]:
            best = layout
            if answer["fits"]:
                break
    return best
