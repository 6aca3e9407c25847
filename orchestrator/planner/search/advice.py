"""What single change would make a plan fit, nearest first; and what change of cluster or workload a
search would need.

Tries changes and reads their predictions; knows no formula.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from orchestrator.planner.calibration.result import Calibration
from orchestrator.planner.cli_output import duration
from orchestrator.planner.model.inputs import Request, table_of
from orchestrator.planner.model.parameters import columns_for
from orchestrator.planner.model.terms import Table
from orchestrator.planner.requests import Scene, Workload
from orchestrator.planner.search.axes import divisors
from orchestrator.planner.search.rank_plans import SearchResult, search
from workers.contracts.base import Refused
from workers.contracts.catalog.devices import DEVICES, GIB
from workers.contracts.specs.cluster import ClusterSpec
from workers.contracts.specs.legality import plan_problems
from workers.contracts.specs.plan import ParallelPlan

_RECOMPUTE = ("none", "selective", "full")
_DOUBLINGS = 6
# what a search looks at when it asks whether anything fits, wherever the asker left the field free
_FEW: dict[str, Any] = {
    "schedule": "1f1b",
    "micro_batch_size": [1, 2, 4],
    "prefetch_layers": None,
    "dp_replicate": None,
}
_QUICK = 500_000


@dataclass(frozen=True)
class Change:
    """One change that makes a plan fit, in words and as values by field, and what the plan then
    needs and takes.

    Fields are a plan's, or `nodes`, `device`, `seq_len`; None: left free. `request` holds the
    changed plan and, where
    that is what changed, the cluster, device or sequence length.
    """

    changes: dict[str, Any]
    message: str
    request: Request
    total_bytes: float
    step_time_s: float

    @property
    def plan(self) -> ParallelPlan:
        return self.request.plan

    def to_dict(self) -> dict[str, Any]:
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
class _Try:
    kind: str
    changes: dict[str, Any]
    message: str
    request: Request


def advise(
    request: Request, calibration: Calibration | None = None, *, most: int = 6
) -> list[Change]:
    """Single changes of a plan that does not fit after which it does: those of the plan first, then
    those of devices,
    in either group the one that costs least time first.

    Of each kind of change (more recomputation, smaller micro-batches, more devices, ...) the
    smallest that is enough.
    Where no single one is, the fastest plan that fits on the same devices. Empty where the plan
    fits, or nothing helps.
    """
    now = table_of([request], columns_for([request], calibration))
    if bool(now.column("fits")[0]):
        return []
    tried = [each for each in _tries(request) if _is_legal(each.request)]
    before = float(now.column("step_time_s")[0])
    changes = _fitting(tried, before, calibration)[:most]
    return changes or _several(request, before, calibration)


def advise_search(
    scene: Scene,
    fix: Mapping[str, Any] | None = None,
    calibration: Calibration | None = None,
    *,
    most: int = 4,
) -> list[Change]:
    """Where no plan fits: single changes of cluster, device, sequence, batch or fixed fields after
    which one does.

    Each is told with a plan that then fits, the fastest of a few. Of each kind the smallest change
    that is enough;
    those that need no other devices first, then by what a token costs in device time.
    """
    found: list[tuple[float, Change]] = []
    for tries in _scene_tries(scene, fix or {}):
        for changes, message, other, its_fix in tries:
            try:
                result = search(
                    other,
                    fix={**_FEW, **its_fix},
                    parameters=_parameters(other, calibration),
                    top=1,
                )
            except Refused:
                continue
            if result.fit:
                found.append(_from_search(changes, message, result))
                break
    found.sort(key=lambda each: (_is_hardware(each[1]), each[0]))
    return [change for _, change in found[:most]]


def _from_search(
    changes: dict[str, Any], message: str, result: SearchResult
) -> tuple[float, Change]:
    request, table = result.requests[0], result.table
    assert table is not None
    needs, takes = float(table.column("total_bytes")[0]), float(table.column("step_time_s")[0])
    beside = _host_words(table, 0)
    told = (
        f"{message}: then {in_words(request.plan)} needs {needs / GIB:.1f} GiB{beside}, a step "
        f"takes {duration(takes)}."
    )
    tokens = request.plan.global_batch_size * request.seq_len
    return takes * request.plan.world_size / tokens, Change(changes, told, request, needs, takes)


def _fitting(tried: list[_Try], before_s: float, calibration: Calibration | None) -> list[Change]:
    """The nearest of each kind among those that fit."""
    if not tried:
        return []
    requests = [each.request for each in tried]
    table = table_of(requests, columns_for(requests, calibration))
    total, time_s, fits = (table.column(name) for name in ("total_bytes", "step_time_s", "fits"))
    usable = table.column("usable_bytes")
    best: dict[str, Change] = {}
    for at, each in enumerate(tried):
        if fits[at] and each.kind not in best:
            needs = (
                f"{max(0.1, total[at] / GIB):.1f} of {usable[at] / GIB:.1f} "
                f"GiB{_host_words(table, at)}"
            )
            told = f"{each.message}: {needs}, {_slower(float(time_s[at]), before_s)}."
            best[each.kind] = Change(
                each.changes, told, each.request, float(total[at]), float(time_s[at])
            )
    return sorted(best.values(), key=lambda change: (_is_hardware(change), change.step_time_s))


def _several(request: Request, before_s: float, calibration: Calibration | None) -> list[Change]:
    """No single change is enough: the fastest plan that fits in the same precision on the same
    devices.
    """
    plan = request.plan
    work = Workload(
        seq_len=request.seq_len, global_batch_size=plan.global_batch_size, tokens=request.tokens
    )
    scene = Scene(request.model, request.cluster, work, request.framework, request.device)
    try:
        parameters = _parameters(scene, calibration)
        result = search(
            scene, fix={"precision": plan.precision}, parameters=parameters, top=1, most=_QUICK
        )
    except Refused:
        return []
    if not result.fit or result.table is None:
        return []
    found, table = result.requests[0], result.table
    names = [
        name
        for name in ParallelPlan.model_fields
        if getattr(found.plan, name) != getattr(plan, name)
    ]
    needs, takes = float(table.column("total_bytes")[0]), float(table.column("step_time_s")[0])
    words = ", ".join(
        f"{name} {getattr(found.plan, name)}"
        for name in names
        if getattr(found.plan, name) is not None
    )
    beside, slower = _host_words(table, 0), _slower(takes, before_s)
    message = (
        f"No single change is enough; together {words}: {needs / GIB:.1f} GiB{beside}, {slower}."
    )
    return [
        Change({name: getattr(found.plan, name) for name in names}, message, found, needs, takes)
    ]


def _tries(request: Request) -> Iterator[_Try]:
    plan, cluster = request.plan, request.cluster

    def changed(kind: str, message: str, **changes: Any) -> _Try:
        return _Try(kind, changes, message, replace(request, plan=_with(plan, **changes)))

    recompute = plan.recompute if plan.recompute in _RECOMPUTE else "none"
    for level in _RECOMPUTE[_RECOMPUTE.index(recompute) + 1 :]:
        what = "everything" if level == "full" else "attention"
        yield changed(
            "recompute", f"Recompute {what} ({level} instead of {plan.recompute})", recompute=level
        )
    for zero in range(plan.zero + 1, 4):
        yield changed("zero", f"ZeRO {zero} instead of {plan.zero}", zero=zero)
    if plan.dp_replicate and plan.dp_replicate > 1:
        yield changed(
            "dp_replicate",
            "Shard over all data-parallel ranks instead of copies",
            dp_replicate=None,
        )
    for size in divisors(plan.micro_batch_size)[:-1]:
        message = f"Micro-batches of {size} instead of {plan.micro_batch_size}"
        yield changed("micro_batch_size", message, micro_batch_size=size)
    if plan.tp > 1 and not plan.sequence_parallel:
        yield changed("sequence_parallel", "Sequence parallelism on", sequence_parallel=True)
    if (
        plan.schedule in {"naive", "gpipe", "pipedream", "interleaved_1f1b", "dualpipev"}
        and plan.pp > 1
    ):
        yield changed(
            "schedule",
            f"Schedule 1f1b instead of {plan.schedule}",
            schedule="1f1b",
            virtual_stages=1,
        )
    for axis in ("tp", "pp", "cp"):
        for times in (2, 4, 8):
            if plan.dp % times == 0:
                degree = getattr(plan, axis) * times
                message = (
                    f"{axis} {degree} and dp {plan.dp // times} instead of {degree // times} "
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
        yield changed("precision", f"Precision {narrow} instead of fp32", precision=narrow)
    yield from _more_devices(request)
    yield from _bigger_devices(request)


def _more_devices(request: Request) -> Iterator[_Try]:
    """More data-parallel ranks on more nodes, the batch as it is where it divides."""
    plan, cluster = request.plan, request.cluster
    for times in (2**each for each in range(1, _DOUBLINGS + 1)):
        nodes = cluster.nodes * times
        if nodes > 2**16 or plan.dp * times > 2**16:
            return
        share = plan.micro_batch_size * plan.dp * times
        batch = plan.global_batch_size if plan.global_batch_size % share == 0 else share
        more = _with(plan, dp=plan.dp * times, global_batch_size=batch)
        wider = ClusterSpec.from_dict({**cluster.to_dict(), "nodes": nodes})
        message = f"{nodes} nodes instead of {cluster.nodes} (dp {more.dp})"
        if batch != plan.global_batch_size:
            message += f", and {batch} sequences a step"
        yield _Try(
            "devices",
            {"nodes": nodes, "dp": more.dp, "global_batch_size": batch},
            message,
            replace(request, plan=more, cluster=wider),
        )


def _bigger_devices(request: Request) -> Iterator[_Try]:
    for name, entry in sorted(
        DEVICES.items(), key=lambda each: (each[1].memory_bytes, each[1].usd_per_hour)
    ):
        if (
            entry.memory_bytes > request.entry.memory_bytes
            and entry.kind == request.entry.kind == "gpu"
        ):
            cluster = ClusterSpec.from_dict({**request.cluster.to_dict(), "device": name})
            message = (
                f"{name} with {entry.memory_bytes / GIB:.0f} GiB instead of {request.entry.name}"
            )
            yield _Try(
                "device", {"device": name}, message, replace(request, cluster=cluster, device=None)
            )


_SceneTry = tuple[dict[str, Any], str, Scene, dict[str, Any]]


def _scene_tries(scene: Scene, fix: Mapping[str, Any]) -> Iterator[Iterator[_SceneTry]]:
    """Kinds of change, each from near to far."""
    cluster, work, entry = scene.cluster, scene.workload, scene.device or scene.cluster.entry

    def nodes() -> Iterator[_SceneTry]:
        for number in (cluster.nodes * 2**each for each in range(1, _DOUBLINGS + 1)):
            if number <= 2**16:
                wider = ClusterSpec.from_dict({**cluster.to_dict(), "nodes": number})
                free = {name: value for name, value in fix.items() if name != "dp"}
                yield (
                    {"nodes": number},
                    f"{number} nodes instead of {cluster.nodes}",
                    replace(scene, cluster=wider),
                    free,
                )

    def devices() -> Iterator[_SceneTry]:
        for name, other in sorted(
            DEVICES.items(), key=lambda each: (each[1].memory_bytes, each[1].usd_per_hour)
        ):
            if other.memory_bytes > entry.memory_bytes and other.kind == "gpu":
                bigger = ClusterSpec.from_dict({**cluster.to_dict(), "device": name})
                message = f"{name} with {other.memory_bytes / GIB:.0f} GiB instead of {entry.name}"
                yield (
                    {"device": name},
                    message,
                    replace(scene, cluster=bigger, device=None),
                    dict(fix),
                )

    def sequences() -> Iterator[_SceneTry]:
        for length in (work.seq_len >> each for each in range(1, _DOUBLINGS + 1)):
            if length >= 128:
                shorter = replace(scene, workload=work.model_copy(update={"seq_len": length}))
                yield (
                    {"seq_len": length},
                    f"Sequences of {length} tokens instead of {work.seq_len}",
                    shorter,
                    dict(fix),
                )

    def batches() -> Iterator[_SceneTry]:
        batch = work.global_batch_size or 1
        for number in (cluster.devices * each for each in (1, 2, 4)):
            if number != batch:
                other = replace(
                    scene, workload=work.model_copy(update={"global_batch_size": number})
                )
                yield (
                    {"global_batch_size": number},
                    f"{number} sequences a step instead of {batch}",
                    other,
                    dict(fix),
                )

    def fixed() -> Iterator[_SceneTry]:
        for name in fix:
            free = {each: value for each, value in fix.items() if each != name}
            yield {name: None}, f"{name} left free instead of fixed", scene, free

    yield from (fixed(), devices(), nodes(), sequences(), batches())


def _with(plan: ParallelPlan, **changes: Any) -> ParallelPlan:
    return ParallelPlan.from_dict({**plan.to_dict(), **changes})


def _copies(plan: ParallelPlan, times: int) -> dict[str, Any]:
    """Copies of hybrid sharding must go on dividing dp."""
    copies = plan.dp_replicate or 1
    return {} if (plan.dp // times) % copies == 0 else {"dp_replicate": None}


def _is_legal(request: Request) -> bool:
    devices = request.cluster.devices
    return not plan_problems(
        request.plan, model=request.model, seq_len=request.seq_len, devices=devices
    )


def _is_hardware(change: Change) -> bool:
    return bool({"nodes", "device"} & change.changes.keys())


def _parameters(scene: Scene, calibration: Calibration | None) -> dict[str, Any]:
    return columns_for([scene.request(ParallelPlan())], calibration)


def _host_words(table: Table, at: int) -> str:
    """What offloading asks of the host for one device: what fits there may not fit here."""
    held = float(np.broadcast_to(table.column("host_bytes"), table.n)[at])
    return f" and {held / GIB:.1f} GiB of the host's memory a device" if held else ""


def _slower(after_s: float, before_s: float) -> str:
    change = after_s / before_s - 1
    if abs(change) < 0.005:
        return "a step takes as long"
    return f"a step takes {abs(change):.0%} {'longer' if change > 0 else 'less'}"


def in_words(plan: ParallelPlan) -> str:
    degrees = [
        f"{name} {getattr(plan, name)}"
        for name in ("dp", "tp", "pp", "cp", "ep")
        if getattr(plan, name) > 1
    ]
    more = [f"ZeRO {plan.zero}"] if plan.zero else []
    more += [f"recompute {plan.recompute}"] if plan.recompute != "none" else []
    more += [f"offload {plan.offload}"] if plan.offload != "none" else []
    return ", ".join([*degrees, *more, plan.precision, f"micro-batch {plan.micro_batch_size}"])
