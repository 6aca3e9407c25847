"""Single changes that make a plan, or some plan of a search, fit in memory.

Predicts candidate changes; has no formula of its own.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from orchestrator.planner.model.calibration_result import Calibration
from orchestrator.planner.model.inputs import Request, table_of
from orchestrator.planner.model.parameters import columns_for
from orchestrator.planner.model.terms import Table
from orchestrator.planner.plan_request import Scenario, Workload
from orchestrator.planner.search.advice.plan_candidates import (
    Candidate,
    is_legal,
    plan_candidates,
)
from orchestrator.planner.search.advice.search_candidates import scenario_candidates
from orchestrator.planner.search.rank_plans import SearchResult, rank_plans
from workers.contracts.base import Refused
from workers.contracts.catalog.units import GIB, format_time
from workers.contracts.specs.plan import ParallelPlan

# values of free fields in a quick search for any plan that fits
_QUICK_FIX: dict[str, Any] = {
    "schedule": "1f1b",
    "micro_batch_size": [1, 2, 4],
    "prefetch_layers": None,
    "dp_replicate": None,
}
_QUICK_LIMIT = 500_000


@dataclass(frozen=True)
class PlanChange:
    """One change that makes a plan fit, as text and as values by field, with the prediction.

    Fields are those of a plan, or `nodes`, `device`, `seq_len`; None: not fixed. `request` holds
    the changed plan, cluster, device or sequence length.
    """

    changes: dict[str, Any]
    message: str
    request: Request
    total_bytes: float
    step_time_s: float

    @property
    def plan(self) -> ParallelPlan:
        """The changed plan."""
        return self.request.plan

    def to_dict(self) -> dict[str, Any]:
        """As plain JSON values."""
        return {
            "message": self.message,
            "changes": self.changes,
            "plan": self.plan.to_dict(),
            "cluster": self.request.cluster.to_dict(),
            "seq_len": self.request.seq_len,
            "total_bytes": round(self.total_bytes),
            "step_time_s": self.step_time_s,
        }


def advise(
    request: Request, calibration: Calibration | None = None, *, most: int = 6
) -> list[PlanChange]:
    """Single changes that make the plan fit: changes of the plan, then of devices, fastest first.

    Of each kind of change (more recomputation, smaller micro-batches, more devices, ...) the
    smallest sufficient one. If no single change is sufficient: the fastest plan that fits on the
    same devices. Empty if the plan fits or nothing helps.
    """
    now = table_of([request], columns_for([request], calibration))
    if bool(now.column("fits")[0]):
        return []
    candidates = [item for item in plan_candidates(request) if is_legal(item.request)]
    before_s = float(now.column("step_time_s")[0])
    changes = _fitting(candidates, before_s, calibration)[:most]
    return changes or _combined_change(request, before_s, calibration)


def advise_search(
    scenario: Scenario,
    fix: Mapping[str, Any] | None = None,
    calibration: Calibration | None = None,
    *,
    most: int = 4,
) -> list[PlanChange]:
    """Single changes of cluster, device, sequence, batch or fixed fields that make some plan fit.

    Each comes with the fastest of a few plans that then fit. Of each kind the smallest sufficient
    change; changes on the same devices first, then by device time per token.
    """
    changes: list[tuple[float, PlanChange]] = []
    for candidates in scenario_candidates(scenario, fix or {}):
        for values, message, changed, changed_fix in candidates:
            try:
                result = rank_plans(
                    changed,
                    fix={**_QUICK_FIX, **changed_fix},
                    parameters=_parameters(changed, calibration),
                    top=1,
                )
            except Refused:
                continue
            if result.fit:
                changes.append(_change_of_search(values, message, result))
                break
    changes.sort(key=lambda item: (_is_hardware(item[1]), item[0]))
    return [change for _, change in changes[:most]]


def _change_of_search(
    changes: dict[str, Any], message: str, result: SearchResult
) -> tuple[float, PlanChange]:
    """`(device seconds per token, change)`."""
    request, table = result.requests[0], result.table
    assert table is not None
    total, time_s = float(table.column("total_bytes")[0]), float(table.column("step_time_s")[0])
    text = (
        f"{message}: then {describe_plan(request.plan)} needs {total / GIB:.1f} "
        f"GiB{_host_text(table, 0)}, a step takes {format_time(time_s)}."
    )
    tokens = request.plan.global_batch_size * request.seq_len
    cost = time_s * request.plan.world_size / tokens
    return cost, PlanChange(changes, text, request, total, time_s)


def _fitting(
    candidates: list[Candidate], before_s: float, calibration: Calibration | None
) -> list[PlanChange]:
    """The smallest sufficient change of each kind."""
    if not candidates:
        return []
    requests = [candidate.request for candidate in candidates]
    table = table_of(requests, columns_for(requests, calibration))
    total, time_s, fits = (table.column(name) for name in ("total_bytes", "step_time_s", "fits"))
    usable = table.column("usable_bytes")
    best: dict[str, PlanChange] = {}
    for row, item in enumerate(candidates):
        if fits[row] and item.kind not in best:
            text = (
                f"{item.message}: {max(0.1, total[row] / GIB):.1f} of {usable[row] / GIB:.1f} "
                f"GiB{_host_text(table, row)}, {_time_change(float(time_s[row]), before_s)}."
            )
            best[item.kind] = PlanChange(
                item.changes, text, item.request, float(total[row]), float(time_s[row])
            )
    return sorted(best.values(), key=lambda change: (_is_hardware(change), change.step_time_s))


def _combined_change(
    request: Request, before_s: float, calibration: Calibration | None
) -> list[PlanChange]:
    """The fastest plan that fits on the same devices in the same precision."""
    plan = request.plan
    work = Workload(
        seq_len=request.seq_len, global_batch_size=plan.global_batch_size, tokens=request.tokens
    )
    scenario = Scenario(request.model, request.cluster, work, request.framework, request.device)
    try:
        parameters = _parameters(scenario, calibration)
        result = rank_plans(
            scenario,
            fix={"precision": plan.precision},
            parameters=parameters,
            top=1,
            most=_QUICK_LIMIT,
        )
    except Refused:
        return []
    if not result.fit or result.table is None:
        return []
    fitting, table = result.requests[0], result.table
    changes = {
        name: getattr(fitting.plan, name)
        for name in ParallelPlan.model_fields
        if getattr(fitting.plan, name) != getattr(plan, name)
    }
    total, time_s = float(table.column("total_bytes")[0]), float(table.column("step_time_s")[0])
    text = ", ".join(f"{name} {value}" for name, value in changes.items() if value is not None)
    message = (
        f"Combine {text}, because no single change is sufficient: {total / GIB:.1f} "
        f"GiB{_host_text(table, 0)}, {_time_change(time_s, before_s)}."
    )
    return [PlanChange(changes, message, fitting, total, time_s)]


def _is_hardware(change: PlanChange) -> bool:
    return bool({"nodes", "device"} & change.changes.keys())


def _parameters(scenario: Scenario, calibration: Calibration | None) -> dict[str, Any]:
    return columns_for([scenario.request(ParallelPlan())], calibration)


def _host_text(table: Table, row: int) -> str:
    """The host memory that offloading needs per device."""
    host_bytes = float(np.broadcast_to(table.column("host_bytes"), table.n)[row])
    return f" and {host_bytes / GIB:.1f} GiB of host memory per device" if host_bytes else ""


def _time_change(after_s: float, before_s: float) -> str:
    change = after_s / before_s - 1
    if abs(change) < 0.005:
        return "a step takes as long"
    return f"a step takes {abs(change):.0%} {'longer' if change > 0 else 'less'}"


def describe_plan(plan: ParallelPlan) -> str:
    """The plan in one line: degrees above 1, ZeRO, recompute, offload, precision, micro-batch."""
    degrees = [
        f"{name} {getattr(plan, name)}"
        for name in ("dp", "tp", "pp", "cp", "ep")
        if getattr(plan, name) > 1
    ]
    more = [f"ZeRO {plan.zero}"] if plan.zero else []
    more += [f"recompute {plan.recompute}"] if plan.recompute != "none" else []
    more += [f"offload {plan.offload}"] if plan.offload != "none" else []
    return ", ".join([*degrees, *more, plan.precision, f"micro-batch {plan.micro_batch_size}"])
