"""What an "auto" plan stands for: the fastest plan that fits, among those that are allowed.

Asks the search and says in a sentence why; knows no formula.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from orchestrator.planner.calibration.result import Calibration
from orchestrator.planner.cli_output import duration
from orchestrator.planner.model.inputs import SCHEDULE, Request
from orchestrator.planner.model.parameters import columns_for
from orchestrator.planner.requests import Scene
from orchestrator.planner.search.advice import in_words
from orchestrator.planner.search.axes import divisors
from orchestrator.planner.search.rank_plans import SearchResult, search
from workers.contracts.base import Problem, Refused, problem
from workers.contracts.catalog.devices import GIB
from workers.contracts.specs.plan import ParallelPlan

_MOST = 1_000_000  # plans looked at: an answer while one waits
_RANKED = 200  # of the fastest, among which one has to run
# pipedream updates with stale gradients, which changes what is learned: only for those who ask for
# it by name
SYNCHRONOUS = tuple(name for name in SCHEDULE if name != "pipedream")
_MICRO_BATCHES = (1, 2, 4, 8, 16, 32, 64)  # tried where no batch is given


@dataclass(frozen=True)
class Choice:
    """The plan, how it was chosen in a sentence, and whether it fits.

    `request` is None where nothing is legal.
    """

    plan: ParallelPlan | None
    how: str
    fits: bool
    request: Request | None
    problems: list[Problem]
    step_time_s: float | None = None
    total_bytes: float | None = None


def resolve_auto(
    scene: Scene,
    *,
    fix: Mapping[str, Any] | None = None,
    allowed: Mapping[str, Any] | None = None,
    calibration: Calibration | None = None,
    runs: Callable[[ParallelPlan], bool] | None = None,
) -> Choice:
    """The fastest plan that fits; where none fits, the one that needs least memory, and `fits` is
    false.

    `fix` are a person's own fields, `allowed` what the engine can run: values by field as in a
    search's `fix`; a fixed
    value that is not allowed is refused. `runs` says whether a plan's values go together in the
    engine. Without a
    global batch, the number of sequences a step is chosen as well: that which trains most tokens a
    second, fewest
    sequences among those within 2% of it. Deterministic. Raises Refused.
    """
    both = _within(dict(fix or {}), dict(allowed or {}))
    if not {"schedule", "weight_stashing", "vertical_sync"} & both.keys():
        both["schedule"] = SYNCHRONOUS
    parameters = columns_for([scene.request(ParallelPlan())], calibration)
    batch, top = scene.workload.global_batch_size, _RANKED if runs else 1
    if batch is not None:
        found = search(scene, fix=both, parameters=parameters, top=top, most=_MOST)
    else:
        found = _best_batch(scene, both, parameters, top=top)
    return _choice(scene, found, _first(found, runs), given_batch=batch is not None)


def choose(scene: Scene, calibration: Calibration | None = None) -> ParallelPlan | list[Problem]:
    """The plan of a request line that leaves it to the planner, or why there is none."""
    try:
        choice = resolve_auto(scene, calibration=calibration)
    except Refused as error:
        return [Problem(field=error.field or "plan", message=error.message, hint=error.hint)]
    return choice.plan if choice.plan is not None else choice.problems


def _within(fix: dict[str, Any], allowed: dict[str, Any]) -> dict[str, Any]:
    """Both at once: fixed values where a field is fixed, else the allowed ones."""
    for name, values in allowed.items():
        wanted = fix.get(name)
        if wanted is None or wanted == "auto":
            fix[name] = values
            continue
        may = values if isinstance(values, (list, tuple)) else (values,)
        asked = wanted if isinstance(wanted, (list, tuple)) else (wanted,)
        common = [each for each in asked if each in may]
        if not common:
            raise Refused(
                f"{name} {', '.join(map(str, asked))} is not what the engine runs",
                " or ".join(str(each) for each in may),
                field=f"plan.{name}",
            )
        fix[name] = common
    return fix


def _first(found: SearchResult, runs: Callable[[ParallelPlan], bool] | None) -> int | None:
    """The rank of the fastest that runs; None where none of those ranked does."""
    if runs is None:
        return 0 if found.requests else None
    return next((place for place, each in enumerate(found.requests) if runs(each.plan)), None)


def _best_batch(
    scene: Scene, fix: dict[str, Any], parameters: Mapping[str, Any], *, top: int
) -> SearchResult:
    """Searches over steps of one micro-batch a rank, and takes the batch that trains most tokens a
    second.

    The largest data parallelism that is legal decides the multiples; each size is a search of its
    own.
    """
    devices = _devices(scene, fix)
    tried: list[tuple[float, int, SearchResult]] = []
    last: SearchResult | None = None
    for times in _MICRO_BATCHES:
        number = devices * times
        work = scene.workload.model_copy(update={"global_batch_size": number})
        other = Scene(scene.model, scene.cluster, work, scene.framework, scene.device)
        result = search(
            other, fix=fix, parameters=parameters, top=top, most=_MOST // len(_MICRO_BATCHES)
        )
        last = last or result
        if not result.fit or result.table is None:
            if tried:
                break
            continue
        tried.append((number / float(result.table.column("step_time_s")[0]), number, result))
        if len(tried) > 1 and tried[-1][0] < tried[-2][0] * 1.02:
            break  # larger steps no longer help
    if not tried:
        assert last is not None
        return last
    best = max(rate for rate, _, _ in tried)
    return next(result for rate, _, result in tried if rate >= 0.98 * best)


def _devices(scene: Scene, fix: Mapping[str, Any]) -> int:
    """Data-parallel ranks at most: the devices over what the fixed degrees take."""
    taken = 1
    for name in ("tp", "pp", "cp"):
        value = fix.get(name)
        taken *= value if isinstance(value, int) else 1
    number = (
        scene.cluster.devices // taken
        if scene.cluster.devices % taken == 0
        else scene.cluster.devices
    )
    most = fix.get("dp")
    return (
        most if isinstance(most, int) else max(each for each in divisors(number) if each <= 2**16)
    )


def _choice(scene: Scene, found: SearchResult, place: int | None, *, given_batch: bool) -> Choice:
    devices = scene.cluster.devices
    where = f"{devices} x {(scene.device or scene.cluster.entry).name}"
    if found.fit and found.table is not None:
        if place is None:
            message = (
                f"none of the {len(found.requests)} fastest plans for {where} is one that the "
                "engine runs"
            )
            return Choice(
                None, message, False, None, [problem("plan", message, "numbers in its place")]
            )
        request, table = found.requests[place], found.table
        needs, takes = (
            float(table.column("total_bytes")[place]),
            float(table.column("step_time_s")[place]),
        )
        batch = "" if given_batch else f", {request.plan.global_batch_size} sequences a step"
        how = (
            f"The fastest of {found.fit:,} plans that fit {where}, of {found.enumerated:,} legal "
            "ones: "
            f"{in_words(request.plan)}{batch}; {needs / GIB:.2f} GiB and {duration(takes)} a step "
            "are predicted."
        )
        return Choice(request.plan, how, True, request, [], takes, needs)
    if found.closest is not None:
        plan = found.closest.plan
        how = (
            f"None of {found.enumerated:,} legal plans fits {where}; the smallest is "
            f"{in_words(plan)}."
        )
        return Choice(plan, how, False, found.closest, [])
    problems = found.problems or [
        problem("plan", f"no legal plan for {where}", "another number of devices")
    ]
    return Choice(None, problems[0].message, False, None, problems)
