"""The planner's doors: request lines in, answer lines out; a search in, ranked plans out.

Joins what the other files compute. Knows no formula, no Django, no files but those that a line may
name.
"""

from __future__ import annotations

import difflib
import math
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

from orchestrator.planner.answers import answers, chosen_trees, explained, is_term, refused
from orchestrator.planner.interchange import KINDS, Exported, Inexpressible
from orchestrator.planner.interchange import export as write_export
from orchestrator.planner.model.inputs import Request, table_of
from orchestrator.planner.model.parameters import columns_for
from orchestrator.planner.model.terms import TERMS, Table
from orchestrator.planner.model.time.intervals import bounds, extrapolations
from orchestrator.planner.requests import (
    SCENE_KEYS,
    Asked,
    BadRequest,
    Choices,
    Scene,
    read,
    read_cluster,
    read_scene,
    read_shape,
    unknown_keys,
    without_comments,
)

from orchestrator.planner.search.advice import advise_search
from orchestrator.planner.search.auto_plan import choose
from orchestrator.planner.search.axes import divisors
from orchestrator.planner.search.plan_notes import of_plans, warnings
from orchestrator.planner.search.rank_plans import Objective, SearchResult
from orchestrator.planner.search.rank_plans import search as run_search
from orchestrator.planner.serving.answer import serving as answer_serving
from workers.contracts.base import Problem, Refused, problem
from workers.contracts.specs.cluster import ClusterSpec
from workers.contracts.specs.plan import ParallelPlan

if TYPE_CHECKING:
    from orchestrator.planner.calibration.result import Calibration

_CELLS = 2**21  # (S, n) cells a table at most: 16 MiB a column
_MOST_TP = 64
_SEARCH_KEYS = (*SCENE_KEYS, "fix", "objective", "top")
_TOP, MOST_TOP = 20, 200
_TOP_EXPLAINED, MOST_EXPLAINED = 3, 10  # all trees of one plan are 2 MB
_MOST_NAMES = 24


@dataclass(frozen=True)
class Trees:
    """Which numbers to explain and how deep: all in place (no `names`), or some beside the answer,
    `explained`.
    """

    names: tuple[str, ...] = ()
    depth: int | None = None


def trees(explain: Any, depth: Any = None) -> Trees | None:
    """What `explain` (true, a number's name, or several) and `explain_depth` ask for.

    Raises BadRequest.
    """
    if depth is not None and (type(depth) is not int or not 0 <= depth <= 100):
        raise BadRequest(
            [
                problem(
                    "explain_depth",
                    f"{str(depth)[:40]} is not a number of levels from 0 to 100",
                    "1",
                )
            ]
        )
    if explain is None or isinstance(explain, bool):
        return Trees((), depth) if explain else None
    names = [explain] if isinstance(explain, str) else explain
    if not isinstance(names, Sequence) or not 1 <= len(names) <= _MOST_NAMES:
        message = f"explain is true, the name of a number, or 1 to {_MOST_NAMES} names"
        raise BadRequest([problem("explain", message, '"step_time_s"')])
    for name in names:
        if not isinstance(name, str) or not is_term(name):
            near = difflib.get_close_matches(str(name), TERMS.terms, n=3, cutoff=0.5) or [
                "step_time_s",
                "total_bytes",
            ]
            raise BadRequest(
                [
                    problem(
                        "explain",
                        f"{str(name)[:60]!r} is no number of the planner",
                        ", ".join(near),
                    )
                ]
            )
    return Trees(tuple(dict.fromkeys(names)), depth)


def estimate(
    lines: Iterable[Any],
    *,
    calibration: Calibration | None = None,
    explain: Trees | None = None,
    choices: Choices | None = None,
) -> list[dict[str, Any]]:
    """An answer line for each request line, in their order (INTERFACES section 4). Never raises for
    bad input.

    A line is an object, or a Problem where it could not even be parsed. With `explain` numbers are
    trees, or some have
    theirs under `explained`.
    """
    return of_asked(
        [read_one(line, choices, calibration) for line in lines],
        calibration=calibration,
        explain=explain,
    )


def of_asked(
    asked: Sequence[Asked], *, calibration: Calibration | None = None, explain: Trees | None = None
) -> list[dict[str, Any]]:
    """The same for lines that were read before."""
    found: list[dict[str, Any]] = [refused(each.id, each.problems) for each in asked]
    legal = {place: each.request for place, each in enumerate(asked) if each.request is not None}
    for some in _batches(legal):
        told = of_requests(
            [legal[place] for place in some], calibration=calibration, explain=explain
        )
        for place, answer in zip(some, told, strict=True):
            found[place] = {**answer, "id": asked[place].id}
    return found


def of_requests(
    requests: Sequence[Request],
    *,
    calibration: Calibration | None = None,
    explain: Trees | None = None,
) -> list[dict[str, Any]]:
    """The same for requests that are known to be legal; their ids are text."""
    return (
        of_table(table_with(requests, calibration), requests, calibration, explain=explain)
        if requests
        else []
    )


def of_table(
    table: Table,
    requests: Sequence[Request],
    calibration: Calibration | None = None,
    *,
    explain: Trees | None = None,
) -> list[dict[str, Any]]:
    """The same from the plans' own table, which must hold every pipeline stage."""
    low, high = bounds(table, requests, calibration)
    told = answers(table, [each.id for each in requests], low, high)
    far = extrapolations(table, requests, calibration)
    notes = [
        [*said, *filter(None, [more])]
        for said, more in zip(of_plans(requests, table), far, strict=True)
    ]
    told = [{**answer, "notes": said} for answer, said in zip(told, notes, strict=True)]
    if explain is None:
        return told
    if explain.names:
        return [
            {**answer, "explained": chosen_trees(table, row, answer, explain.names, explain.depth)}
            for row, answer in enumerate(told)
        ]
    return [explained(table, row, answer, explain.depth) for row, answer in enumerate(told)]


def table_with(requests: Sequence[Request], calibration: Calibration | None = None) -> Table:
    """All terms of these plans, every pipeline stage shown."""
    return table_of(requests, columns_for(requests, calibration))


def read_one(
    line: Any, choices: Choices | None = None, calibration: Calibration | None = None
) -> Asked:
    """One line; where its plan is "auto", the one that the planner chooses.

    Never raises for bad input.
    """
    try:
        return read(line, choices, lambda scene: choose(scene, calibration))
    except RecursionError:
        return Asked(
            problems=[
                problem("", "the line is nested beyond reason", "an object as in the documentation")
            ]
        )


def search(
    request: Any,
    *,
    calibration: Calibration | None = None,
    explain: Trees | None = None,
    choices: Choices | None = None,
    front: bool = False,
) -> dict[str, Any]:
    """The search answer (INTERFACES section 4), its plans ranked, with `notes`, and `advice` where
    nothing fits.

    `request` is `{model, cluster, workload {seq_len, global_batch_size, tokens?}, framework?, fix?,
    objective?, top?}`.
    `top` bounds the answer's plans; without it the Pareto front follows the ranked ones, as with
    `front`.
    Raises BadRequest with a sentence for each wrong field.
    """
    started = time.perf_counter()
    asked = _question(request, choices or Choices(), explain is not None)
    scene = asked.scene
    parameters = columns_for([scene.request(ParallelPlan())], calibration)
    try:
        found = run_search(
            scene,
            fix=asked.fix,
            parameters=parameters,
            objective=cast(Objective, asked.objective),
            top=asked.top,
        )
    except Refused as error:
        raise BadRequest(
            [Problem(field=error.field, message=error.message, hint=error.hint)]
        ) from None
    most = asked.top if explain or (not front and request.get("top") is not None) else None
    answer: dict[str, Any] = {
        "enumerated": found.enumerated,
        "legal": found.legal,
        "fit": found.fit,
        "seconds": 0.0,
        "plans": _ranked(scene, found, calibration, most=most, explain=explain),
        "pareto": [place for place in found.pareto if most is None or place < most],
        "rejected": found.rejected,
        "notes": [
            *found.notes,
            *warnings(found.requests[: asked.top], found.table),
            *_of_best(found, calibration),
        ],
        "problems": [item.model_dump(by_alias=True) for item in found.problems],
    }
    if found.closest is not None:
        [nearest] = of_requests([found.closest], calibration=calibration)
        answer["closest"] = {"plan": found.closest.plan.to_dict(), **nearest}
        answer["advice"] = [each.to_dict() for each in advise_search(scene, asked.fix, calibration)]
    answer["seconds"] = round(time.perf_counter() - started, 6)
    return answer


def _of_best(found: SearchResult, calibration: Calibration | None) -> list[str]:
    """That the time of the best plan is extrapolated, where it is."""
    if found.table is None or not found.requests:
        return []
    said = extrapolations(found.table.take(slice(0, 1)), found.requests[:1], calibration)
    return [f"Number 1: {each[0].lower()}{each[1:]}" for each in said if each]


@dataclass(frozen=True)
class _Question:
    scene: Scene
    fix: dict[str, Any]
    objective: str
    top: int


def _question(request: Any, choices: Choices, explain: bool) -> _Question:
    if not isinstance(request, Mapping):
        raise BadRequest([problem("", "a search is a JSON object", '{"model": "llama3-8b", ...}')])
    request = without_comments(request)
    problems = unknown_keys(request, _SEARCH_KEYS)
    scene, more = read_scene(request, choices)
    problems += more
    fix, objective = request.get("fix") or {}, request.get("objective") or "time"
    usual, most = (_TOP_EXPLAINED, MOST_EXPLAINED) if explain else (_TOP, MOST_TOP)
    top = usual if request.get("top") is None else request["top"]
    if not isinstance(fix, Mapping):
        problems.append(problem("fix", "fix is an object of a plan's fields", '{"tp": 8}'))
    if type(top) is not int or not 1 <= top <= most:
        which = "explained plans" if explain else "plans"
        problems.append(
            problem(
                "top", f"{str(top)[:40]} is not a number of {which} from 1 to {most}", str(usual)
            )
        )
    if not isinstance(objective, str):
        problems.append(problem("objective", "an objective is a word", "time"))
    if scene is None or problems:
        raise BadRequest(problems)
    return _Question(scene, dict(fix), objective, top)


def _ranked(
    scene: Scene,
    found: SearchResult,
    calibration: Calibration | None,
    *,
    most: int | None,
    explain: Trees | None,
) -> list[dict[str, Any]]:
    """The plans' answers, best first, at most so many."""
    if found.table is None:
        return []
    requests = found.requests[:most]
    table = found.table.take(slice(0, len(requests)))
    told = of_table(table, requests, calibration, explain=explain)
    plans = [
        {"plan": used.plan.to_dict(), **answer} for used, answer in zip(requests, told, strict=True)
    ]
    for rank, (answer, used) in enumerate(zip(plans, requests, strict=True), 1):
        answer["id"] = str(rank)
        if used.cluster.devices != scene.cluster.devices:
            answer["cluster"] = {**used.cluster.to_dict(), "device": used.entry.name}
    return plans


def export(
    line: Any, kind: str, *, calibration: Calibration | None = None, choices: Choices | None = None
) -> Exported:
    """The plan of a request line as configuration of `kind` (torchtitan, megatron, deepspeed,
    accelerate).

    Raises BadRequest for a line that has problems and for what that engine cannot run.
    """
    asked = read_one(line, choices, calibration)
    if asked.request is None:
        raise BadRequest(asked.problems)
    request, steps = asked.request, None
    if request.tokens:
        steps = max(
            1, math.ceil(request.tokens / (request.plan.global_batch_size * request.seq_len))
        )
    cluster = request.cluster.model_copy(update={"device": request.entry.name})
    try:
        return write_export(
            kind,
            model=request.model,
            plan=request.plan,
            cluster=cluster,
            seq_len=request.seq_len,
            steps=steps,
        )
    except Inexpressible as error:
        message, _, next_ = str(error).rpartition("; ")
        raise BadRequest(
            [
                problem(
                    "engine" if kind not in KINDS else "plan",
                    message or next_,
                    next_ if message else "",
                )
            ]
        ) from None


def serving(
    request: Any, *, explain: bool = False, choices: Choices | None = None
) -> dict[str, Any]:
    """What serving a model would reach: memory, TTFT, TPOT, tokens/s, concurrency.

    Raises BadRequest.
    """
    if not isinstance(request, Mapping):
        raise BadRequest(
            [problem("", "a serving question is a JSON object", '{"model": "llama3-8b", ...}')]
        )
    request = without_comments(request)
    model, problems = read_shape(request.get("model"), files=bool(choices and choices.files))
    cluster, device, more = read_cluster(request.get("cluster"), choices.devices if choices else {})
    problems += more + (
        unknown_keys({"device": 0}, ("cluster.device",)) if "device" in request else []
    )
    if model is None or cluster is None or problems:
        raise BadRequest(problems)
    given = {key: value for key, value in request.items() if key not in ("id", "source")}
    given |= {"model": model, "cluster": cluster, "device": device}
    told = answer_serving({**given, **_spread(given, cluster)}, explained=explain)
    if not told["ok"]:
        raise BadRequest([_problem(each) for each in told["problems"]])
    return {"id": request.get("id"), **told}


def _spread(given: Mapping[str, Any], cluster: ClusterSpec) -> dict[str, int]:
    """Where nobody says how to lay the model out: the fewest devices of a node that hold it, copied
    over the rest.
    """
    if any(name in given for name in ("tp", "pp", "replicas")):
        return {}
    best = {}
    for tp in (each for each in divisors(cluster.devices_per_node) if each <= _MOST_TP):
        layout = {"tp": tp, "replicas": cluster.devices // tp}
        told = answer_serving({**given, **layout})
        if told["ok"]:
            best = layout
            if told["fits"]:
                break
    return best


def _problem(told: Mapping[str, str]) -> Problem:
    return Problem(field=told["field"], message=told["message"], hint=told.get("hint", ""))


def _batches(legal: Mapping[int, Request]) -> Iterable[list[int]]:
    """Places in groups of like pipeline depth, so that a deep pipeline does not widen everybody's
    table.
    """
    groups: dict[int, list[int]] = {}
    for place, request in legal.items():
        groups.setdefault((request.plan.pp - 1).bit_length(), []).append(place)
    for deep, some in groups.items():
        most = max(1, _CELLS >> deep)
        yield from (some[start : start + most] for start in range(0, len(some), most))
