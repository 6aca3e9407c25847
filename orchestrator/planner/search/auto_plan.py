"""Resolves an "auto" plan: the fastest allowed plan that fits, with a reason.

Uses the search; has no formula of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from orchestrator.planner.model.calibration_result import Calibration
from orchestrator.planner.model.columns.codes import SCHEDULE
from orchestrator.planner.model.inputs import Request
from orchestrator.planner.model.parameters import columns_for
from orchestrator.planner.plan_request import Scenario
from orchestrator.planner.search.advice.advise import describe_plan
from orchestrator.planner.search.axes import divisors
from orchestrator.planner.search.rank_plans import SearchResult, rank_plans
from workers.contracts.base import Problem, Refused, problem
from workers.contracts.catalog.units import GIB, format_time
from workers.contracts.specs.plan import ParallelPlan

_MAX_PLANS = 1_000_000  # plans evaluated, so that the answer is interactive
_RANKED = 200  # fastest plans among which the engine must support one
# pipedream updates with stale gradients, which changes training: only if it is requested by name
SYNCHRONOUS = tuple(name for name in SCHEDULE if name != "pipedream")
_ROOMY = 0.8  # of the capacity; a plan predicted below needs no variant that saves memory
_MICRO_BATCHES = (1, 2, 4, 8, 16, 32, 64)  # sizes to try if no batch is given


@dataclass(frozen=True)
class Choice:
    """The chosen plan, the reason in `how`, and whether it fits.

    `request` is None if no plan is legal.
    """

    plan: ParallelPlan | None
    how: str
    fits: bool
    request: Request | None
    problems: list[Problem]
    step_time_s: float | None = None
    total_bytes: float | None = None
    # the chosen one and the next fastest that differ in more than what they save of memory
    candidates: list[ParallelPlan] = field(default_factory=list)


def resolve_auto(
    scenario: Scenario,
    *,
    fix: Mapping[str, Any] | None = None,
    allowed: Mapping[str, Any] | None = None,
    calibration: Calibration | None = None,
    runs: Callable[[ParallelPlan], bool] | None = None,
    count: int = 1,
) -> Choice:
    """The fastest plan that fits; if none fits, the one with the least memory and `fits` false.

    `fix` holds the user's fields, `allowed` the values that the engine supports, both as in a
    search's `fix`; a fixed value that is not allowed is refused. `runs`: whether the engine
    supports a combination. `count`: how many candidates to name. Without a global batch, the batch
    with the most tokens/s is chosen, the smallest one within 2% of it. Deterministic. Raises
    Refused.
    """
    values = _intersect(dict(fix or {}), dict(allowed or {}))
    if not {"schedule", "weight_stashing", "vertical_sync"} & values.keys():
        values["schedule"] = SYNCHRONOUS
    parameters = columns_for([scenario.request(ParallelPlan())], calibration)
    batch, top = scenario.workload.global_batch_size, _RANKED if runs or count > 1 else 1
    if batch is not None:
        result = rank_plans(scenario, fix=values, parameters=parameters, top=top, most=_MAX_PLANS)
    else:
        result = _search_batches(scenario, values, parameters, top=top)
    choice = _choice(
        scenario, result, _first_supported(result, runs), batch_given=batch is not None
    )
    if count == 1 or choice.plan is None or not choice.fits:
        return choice
    return replace(choice, candidates=_distinct(result, runs, count))


def choose_plan(
    scenario: Scenario, calibration: Calibration | None = None
) -> ParallelPlan | list[Problem]:
    """The plan of a request line with an "auto" plan, or the reason for refusing it."""
    try:
        choice = resolve_auto(scenario, calibration=calibration)
    except Refused as error:
        return [Problem(field=error.field or "plan", message=error.message, hint=error.hint)]
    return choice.plan if choice.plan is not None else choice.problems


def _intersect(fix: dict[str, Any], allowed: dict[str, Any]) -> dict[str, Any]:
    """Fixed values that are allowed; the allowed values for fields that are not fixed."""
    for name, values in allowed.items():
        fixed = fix.get(name)
        if fixed is None or fixed == "auto":
            fix[name] = values
            continue
        supported = values if isinstance(values, (list, tuple)) else (values,)
        requested = fixed if isinstance(fixed, (list, tuple)) else (fixed,)
        common = [value for value in requested if value in supported]
        if not common:
            raise Refused(
                f"the engine does not support {name} {', '.join(map(str, requested))}",
                f"Use {' or '.join(str(value) for value in supported)}.",
                field=f"plan.{name}",
            )
        fix[name] = common
    return fix


def _first_supported(
    result: SearchResult, runs: Callable[[ParallelPlan], bool] | None
) -> int | None:
    """The index of the fastest plan that the engine supports; None if it supports no plan."""
    if runs is None:
        return 0 if result.requests else None
    return next((index for index, item in enumerate(result.requests) if runs(item.plan)), None)


def _distinct(
    result: SearchResult, runs: Callable[[ParallelPlan], bool] | None, count: int
) -> list[ParallelPlan]:
    """The fastest plans that the engine supports, at most `count`.

    A variant that only saves memory is slower than the plan without it, so it counts only if that
    plan might run out of memory.
    """
    assert result.table is not None
    total, capacity = result.table.column("total_bytes"), result.table.column("capacity_bytes")
    chosen: dict[str, ParallelPlan] = {}
    for index in np.argsort(result.table.column("step_time_s"), kind="stable").tolist():
        plan = result.requests[index].plan
        roomy = float(total[index]) < _ROOMY * float(capacity[index])
        same = {"recompute", "offload"} if roomy else set()
        key = plan.model_dump_json(exclude=same)
        if key in chosen or plan.model_dump_json(exclude={"recompute", "offload"}) in chosen:
            continue
        if runs is None or runs(plan):
            chosen[key] = plan
        if len(chosen) == count:
            break
    return list(chosen.values())


def _search_batches(
    scenario: Scenario, fix: dict[str, Any], parameters: Mapping[str, Any], *, top: int
) -> SearchResult:
    """Searches several batch sizes and returns the result with the most tokens/s.

    Batches are multiples of the largest legal data-parallel degree; each size is one search.
    """
    ranks = _max_dp(scenario, fix)
    results: list[tuple[float, SearchResult]] = []
    last: SearchResult | None = None
    for times in _MICRO_BATCHES:
        number = ranks * times
        work = scenario.workload.model_copy(update={"global_batch_size": number})
        changed = replace(scenario, workload=work)
        result = rank_plans(
            changed, fix=fix, parameters=parameters, top=top, most=_MAX_PLANS // len(_MICRO_BATCHES)
        )
        last = last or result
        if not result.fit or result.table is None:
            if results:
                break
            continue
        results.append((number / float(result.table.column("step_time_s")[0]), result))
        if len(results) > 1 and results[-1][0] < results[-2][0] * 1.02:
            break  # larger steps no longer help
    if not results:
        assert last is not None
        return last
    best = max(rate for rate, _ in results)
    return next(result for rate, result in results if rate >= 0.98 * best)


def _max_dp(scenario: Scenario, fix: Mapping[str, Any]) -> int:
    """The largest data-parallel degree: devices divided by the fixed degrees."""
    taken = 1
    for name in ("tp", "pp", "cp"):
        value = fix.get(name)
        taken *= value if isinstance(value, int) else 1
    number = (
        scenario.cluster.devices // taken
        if scenario.cluster.devices % taken == 0
        else scenario.cluster.devices
    )
    dp = fix.get("dp")
    return dp if isinstance(dp, int) else max(item for item in divisors(number) if item <= 2**16)


def _choice(
    scenario: Scenario, result: SearchResult, index: int | None, *, batch_given: bool
) -> Choice:
    devices = scenario.cluster.devices
    where = f"{devices} x {(scenario.device or scenario.cluster.entry).name}"
    if result.fit and result.table is not None:
        if index is None:
            message = (
                f"the engine does not support any of the {len(result.requests)} fastest plans for "
                f"{where}"
            )
            return Choice(
                None, message, False, None, [problem("plan", message, "Use an explicit plan.")]
            )
        request, table = result.requests[index], result.table
        total = float(table.column("total_bytes")[index])
        time_s = float(table.column("step_time_s")[index])
        batch = "" if batch_given else f", {request.plan.global_batch_size} sequences per step"
        how = (
            f"The fastest of {result.fit:,} plans that fit {where}, of {result.enumerated:,} legal "
            f"plans: {describe_plan(request.plan)}{batch}; predicted: {total / GIB:.2f} GiB and "
            f"{format_time(time_s)} per step."
        )
        return Choice(request.plan, how, True, request, [], time_s, total)
    if result.closest is not None:
        plan = result.closest.plan
        how = (
            f"None of {result.enumerated:,} legal plans fits {where}; the smallest is "
            f"{describe_plan(plan)}."
        )
        return Choice(plan, how, False, result.closest, [])
    problems = result.problems or [
        problem("plan", f"no legal plan for {where}", "Use another number of devices.")
    ]
    return Choice(None, problems[0].message, False, None, problems)
