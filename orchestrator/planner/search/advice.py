"""Single changes that make a plan, or some plan of a search, fit in memory.

Predicts candidate changes; has no formula of its own.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from orchestrator.planner.model.calibration_result import Calibration
from orchestrator.planner.model.inputs import Request, table_of
from orchestrator.planner.model.parameters import columns_for
from orchestrator.planner.model.terms import Table
from orchestrator.planner.plan_request import Scenario, Workload
from orchestrator.planner.search.axes import divisors
from orchestrator.planner.search.rank_plans import SearchResult, rank_plans
from workers.contracts.base import Refused
from workers.contracts.catalog.devices import DEVICES
from workers.contracts.catalog.units import GIB, format_time
from workers.contracts.specs.cluster import ClusterSpec
from workers.contracts.specs.legality import plan_problems
from workers.contracts.specs.plan import ParallelPlan

_RECOMPUTE = ("none", "selective", "full")
_DOUBLINGS = 6
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


@dataclass(frozen=True)
class _Candidate:
    kind: str
    changes: dict[str, Any]
    message: str
    request: Request


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
    candidates = [item for item in _candidates(request) if _is_legal(item.request)]
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
    for candidates in _scenario_candidates(scenario, fix or {}):
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
    candidates: list[_Candidate], before_s: float, calibration: Calibration | None
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


def _candidates(request: Request) -> Iterator[_Candidate]:
    plan, cluster = request.plan, request.cluster

    def changed(kind: str, message: str, **changes: Any) -> _Candidate:
        return _Candidate(kind, changes, message, replace(request, plan=_with(plan, **changes)))

    recompute = plan.recompute if plan.recompute in _RECOMPUTE else "none"
    for level in _RECOMPUTE[_RECOMPUTE.index(recompute) + 1 :]:
        what = "everything" if level == "full" else "attention"
        yield changed(
            "recompute", f"Recompute {what} ({level} instead of {plan.recompute})", recompute=level
        )
    for zero in range(plan.zero + 1, 4):
        yield changed("zero", f"Use ZeRO {zero} instead of {plan.zero}", zero=zero)
    if plan.dp_replicate and plan.dp_replicate > 1:
        yield changed(
            "dp_replicate",
            "Shard over all data-parallel ranks instead of replicating",
            dp_replicate=None,
        )
    for size in divisors(plan.micro_batch_size)[:-1]:
        message = f"Use micro-batches of {size} instead of {plan.micro_batch_size}"
        yield changed("micro_batch_size", message, micro_batch_size=size)
    if plan.tp > 1 and not plan.sequence_parallel:
        yield changed("sequence_parallel", "Turn sequence parallelism on", sequence_parallel=True)
    if (
        plan.schedule in {"naive", "gpipe", "pipedream", "interleaved_1f1b", "dualpipev"}
        and plan.pp > 1
    ):
        yield changed(
            "schedule",
            f"Use schedule 1f1b instead of {plan.schedule}",
            schedule="1f1b",
            virtual_stages=1,
        )
    for axis in ("tp", "pp", "cp"):
        for times in (2, 4, 8):
            if plan.dp % times == 0:
                degree = getattr(plan, axis) * times
                message = (
                    f"Use {axis} {degree} and dp {plan.dp // times} instead of {degree // times} "
                    f"and {plan.dp}"
                )
                if axis != "tp" or degree <= cluster.devices_per_node:
                    yield changed(
                        axis,
                        message,
                        **{axis: degree, "dp": plan.dp // times, **_copies(plan, times)},
                    )
    for offload, what in (
        ("optimizer", "optimizer states"),
        ("all", "all states"),
        ("nvme", "all states on disk"),
    ):
        is_cpu = request.entry.kind == "cpu" and offload != "nvme"
        if plan.offload == "none" and not is_cpu:
            yield changed("offload", f"Offload {what} to the host", offload=offload)
    if plan.precision == "fp32" and request.entry.kind != "cpu":
        narrow = "bf16" if request.entry.supports("bf16") else "fp16"
        yield changed("precision", f"Use precision {narrow} instead of fp32", precision=narrow)
    yield from _more_devices(request)
    yield from _bigger_devices(request)


def _more_devices(request: Request) -> Iterator[_Candidate]:
    """More data-parallel ranks on more nodes; the batch stays if it divides."""
    plan, cluster = request.plan, request.cluster
    for times in (2**power for power in range(1, _DOUBLINGS + 1)):
        nodes = cluster.nodes * times
        if nodes > 2**16 or plan.dp * times > 2**16:
            return
        share = plan.micro_batch_size * plan.dp * times
        batch = plan.global_batch_size if plan.global_batch_size % share == 0 else share
        more = _with(plan, dp=plan.dp * times, global_batch_size=batch)
        wider = ClusterSpec.from_dict({**cluster.to_dict(), "nodes": nodes})
        message = f"Use {nodes} nodes instead of {cluster.nodes} (dp {more.dp})"
        if batch != plan.global_batch_size:
            message += f", and {batch} sequences per step"
        yield _Candidate(
            "devices",
            {"nodes": nodes, "dp": more.dp, "global_batch_size": batch},
            message,
            replace(request, plan=more, cluster=wider),
        )


def _bigger_devices(request: Request) -> Iterator[_Candidate]:
    for name, entry in sorted(
        DEVICES.items(), key=lambda item: (item[1].memory_bytes, item[1].usd_per_hour)
    ):
        if (
            entry.memory_bytes > request.entry.memory_bytes
            and entry.kind == request.entry.kind == "gpu"
        ):
            cluster = ClusterSpec.from_dict({**request.cluster.to_dict(), "device": name})
            gib = entry.memory_bytes / GIB
            message = f"Use {name} with {gib:.0f} GiB instead of {request.entry.name}"
            yield _Candidate(
                "device", {"device": name}, message, replace(request, cluster=cluster, device=None)
            )


_ScenarioCandidate = tuple[dict[str, Any], str, Scenario, dict[str, Any]]


def _scenario_candidates(
    scenario: Scenario, fix: Mapping[str, Any]
) -> Iterator[Iterator[_ScenarioCandidate]]:
    """One iterator per kind of change, from the smallest change to the largest."""
    cluster, work, entry = (
        scenario.cluster,
        scenario.workload,
        scenario.device or scenario.cluster.entry,
    )

    def nodes() -> Iterator[_ScenarioCandidate]:
        for number in (cluster.nodes * 2**power for power in range(1, _DOUBLINGS + 1)):
            if number <= 2**16:
                wider = ClusterSpec.from_dict({**cluster.to_dict(), "nodes": number})
                free = {name: value for name, value in fix.items() if name != "dp"}
                yield (
                    {"nodes": number},
                    f"Use {number} nodes instead of {cluster.nodes}",
                    replace(scenario, cluster=wider),
                    free,
                )

    def devices() -> Iterator[_ScenarioCandidate]:
        for name, other in sorted(
            DEVICES.items(), key=lambda item: (item[1].memory_bytes, item[1].usd_per_hour)
        ):
            if other.memory_bytes > entry.memory_bytes and other.kind == "gpu":
                bigger = ClusterSpec.from_dict({**cluster.to_dict(), "device": name})
                message = (
                    f"Use {name} with {other.memory_bytes / GIB:.0f} GiB instead of {entry.name}"
                )
                yield (
                    {"device": name},
                    message,
                    replace(scenario, cluster=bigger, device=None),
                    dict(fix),
                )

    def sequences() -> Iterator[_ScenarioCandidate]:
        for length in (work.seq_len >> power for power in range(1, _DOUBLINGS + 1)):
            if length >= 128:
                shorter = replace(scenario, workload=work.model_copy(update={"seq_len": length}))
                yield (
                    {"seq_len": length},
                    f"Sequences of {length} tokens instead of {work.seq_len}",
                    shorter,
                    dict(fix),
                )

    def batches() -> Iterator[_ScenarioCandidate]:
        batch = work.global_batch_size or 1
        for number in (cluster.devices * factor for factor in (1, 2, 4)):
            if number != batch:
                other = replace(
                    scenario, workload=work.model_copy(update={"global_batch_size": number})
                )
                yield (
                    {"global_batch_size": number},
                    f"{number} sequences per step instead of {batch}",
                    other,
                    dict(fix),
                )

    def fixed() -> Iterator[_ScenarioCandidate]:
        for name in fix:
            free = {key: value for key, value in fix.items() if key != name}
            yield {name: None}, f"{name} not fixed", scenario, free

    yield from (fixed(), devices(), nodes(), sequences(), batches())


def _with(plan: ParallelPlan, **changes: Any) -> ParallelPlan:
    return ParallelPlan.from_dict({**plan.to_dict(), **changes})


def _copies(plan: ParallelPlan, times: int) -> dict[str, Any]:
    """Drops `dp_replicate` if it does not divide the smaller dp."""
    copies = plan.dp_replicate or 1
    return {} if (plan.dp // times) % copies == 0 else {"dp_replicate": None}


def _is_legal(request: Request) -> bool:
    devices = request.cluster.devices
    return not plan_problems(
        request.plan, model=request.model, seq_len=request.seq_len, devices=devices
    )


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
