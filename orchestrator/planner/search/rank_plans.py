"""Ranks every legal plan: memory of all, time of those that fit, the best by an objective and the
Pareto front.

Joins enumeration and terms; knows no formula of its own.
"""

from __future__ import annotations

import math
import time
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import numpy as np

import orchestrator.planner.model.all_terms  # noqa: F401  registers the terms
from orchestrator.planner.model.grid import Block, constant_plan, plan_of
from orchestrator.planner.model.inputs import (
    Request,
    device_columns,
    model_columns,
    stage_columns,
    table_of,
)
from orchestrator.planner.model.memory.representative_ranks import probe_columns
from orchestrator.planner.model.terms import Table
from orchestrator.planner.requests import Scene

from orchestrator.planner.search.axes import DEVICES, Axes, axes
from orchestrator.planner.search.enumeration import MOST_CANDIDATES, enumerate_plans
from orchestrator.planner.search.pareto import Best, Front, thinned, undominated
from workers.contracts.base import Problem, Refused, problem
from workers.contracts.specs.cluster import ClusterSpec
from workers.contracts.specs.legality import nearest_divisor, plan_problems
from workers.contracts.specs.plan import ParallelPlan

Objective = Literal["time", "cost", "memory"]
# what is compared first; the rest decide between equals
_ORDER: dict[str, tuple[str, ...]] = {
    "time": ("step_time_s", "total_bytes"),
    "cost": ("usd_per_billion_tokens", "step_time_s", "total_bytes"),
    "memory": ("total_bytes", "step_time_s"),
}
# plans computed at once: fewer, and calls cost more than numbers; more, and columns leave the cache
_CELLS = 2**17
MOST_ON_FRONT = 48
# plans that differ in these alone are shown once, with their best values, as long as others are
# left to show
_VARIANTS = frozenset({"virtual_stages", "prefetch_layers", "dp_replicate"})
_KEPT_VARIANTS = 12


@dataclass(frozen=True)
class SearchResult:
    """What a search found. `enumerated` counts legal candidates, all of which were looked at; `fit`
    those that fit.

    `plans` are ranked best first, variants that differ in virtual stages, prefetch or copies alone
    shown once; those of
    the Pareto front follow, and `pareto` are its indices into `plans`. `requests` are the same with
    all they rest on,
    `table` their terms with every pipeline stage. `closest` is the plan that needs the least memory
    where nothing fits.
    `problems` say why nothing is legal.
    """

    enumerated: int
    legal: int
    fit: int
    seconds: float
    plans: list[ParallelPlan]
    requests: list[Request]
    table: Table | None
    pareto: list[int]
    rejected: dict[str, int]
    notes: list[str] = field(default_factory=list)
    problems: list[Problem] = field(default_factory=list)
    closest: Request | None = None


def search(
    scene: Scene,
    *,
    fix: Mapping[str, Any] | None = None,
    parameters: Mapping[str, Any],
    objective: Objective = "time",
    top: int = 20,
    most: int = MOST_CANDIDATES,
) -> SearchResult:
    """The best plans of the scene's global batch. `fix` holds fields of a plan, each a value or a
    list of values, and
    `devices`: a number of them, or "any" to use fewer than all.

    `parameters` are the calibratable ones as scalars. Raises Refused where `fix` is wrong or the
    search too large.
    """
    started = time.perf_counter()
    if objective not in _ORDER:
        raise Refused(f"{objective!r} is not an objective", ", ".join(_ORDER), field="objective")
    batch = scene.workload.global_batch_size
    if batch is None:
        raise Refused(
            "a search needs the sequences of a step",
            "workload.global_batch_size 512",
            field="workload",
        )
    entry = scene.device or scene.cluster.entry
    chosen = axes(fix, scene.cluster, entry)
    space = enumerate_plans(
        scene.model, scene.cluster, scene.workload.seq_len, batch, chosen, most=most
    )
    rejected = Counter(space.rejected)
    found = _Found(objective, top)
    for part, table in _tables(scene, chosen, list(space.parts(_CELLS)), parameters, batch):
        found.add(part, table)
    if space.size > found.fit:
        rejected["memory: does not fit"] = space.size - found.fit
    ids, front = found.chosen()
    requests = [_request(scene, chosen, found.cell(each), batch) for each in ids]
    problems = [] if space.size else _why_none(scene, chosen, batch, rejected)
    closest = None
    if space.size and not found.fit:
        closest = _request(scene, chosen, found.cell(int(found.smallest.ids[0])), batch)
    return SearchResult(
        enumerated=space.size,
        legal=space.size,
        fit=found.fit,
        seconds=time.perf_counter() - started,
        plans=[each.plan for each in requests],
        requests=requests,
        table=table_of(requests, parameters) if requests else None,
        pareto=front,
        rejected=dict(rejected.most_common()),
        notes=list(space.notes),
        problems=problems,
        closest=closest,
    )


class _Found:
    """What has been seen so far: counts, the best, the front for each number of devices, the
    smallest.
    """

    def __init__(self, objective: Objective, top: int) -> None:
        self.order = _ORDER[objective]
        self.top = max(1, top)
        self.best, self.smallest = Best(self.top * _KEPT_VARIANTS if top > 1 else 1), Best(1)
        self.fronts: dict[int, Front] = {}
        self.parts: list[Block] = []
        self.starts: list[int] = []
        self.seen = self.fit = 0

    def add(self, part: Block, table: Table) -> None:
        shape, start = part.shape, self.seen
        self.parts.append(part)
        self.starts.append(start)
        self.seen += part.cells
        fits = np.broadcast_to(table["fits"], shape)
        if part.legal is not None:
            fits = fits & part.legal
        number = int(fits.sum())
        self.fit += number
        if not number:
            if not self.fit:
                total = np.broadcast_to(table["total_bytes"], shape)
                total = total if part.legal is None else np.where(part.legal, total, np.inf)
                at = int(total.argmin())
                self.smallest.add([total.reshape(-1)[at : at + 1]], np.array([start + at]))
            return
        cells = np.flatnonzero(fits)
        columns = {
            name: np.broadcast_to(table[name], shape)[fits] for name in {*self.order, "total_bytes"}
        }
        ids = cells + start
        self.best.add([columns[name] for name in self.order], ids)
        time_s, bytes_ = columns["step_time_s"], columns["total_bytes"]
        devices = part.rows["nodes"] * part.rows["devices_per_node"]
        if (devices == devices[0]).all():
            self._front(int(devices[0])).add(time_s, bytes_, ids)
            return
        of_cell = devices[cells % len(devices)]
        for each in np.unique(of_cell).tolist():
            here = of_cell == each
            self._front(each).add(time_s[here], bytes_[here], ids[here])

    def _front(self, devices: int) -> Front:
        return self.fronts.setdefault(devices, Front())

    def chosen(self) -> tuple[list[int], list[int]]:
        """Ids of the plans to show, the ranked ones first, and which of them (by index) lie on the
        front.

        At one price a device-hour, cost follows from time and number of devices, and headroom from
        memory: the front
        over time, cost, headroom and devices is that over time, memory and devices.
        """
        ranked = self._different(self.best.ids.tolist())
        fronts = [
            (devices, front) for devices, front in sorted(self.fronts.items()) if front.ids.size
        ]
        if not fronts:
            return ranked, []
        time_s = np.concatenate([front.first for _, front in fronts])
        bytes_ = np.concatenate([front.second for _, front in fronts])
        number = np.concatenate([np.full(front.ids.size, devices) for devices, front in fronts])
        ids = np.concatenate([front.ids for _, front in fronts])
        if len(fronts) > 1:
            kept = undominated([time_s, bytes_, number])
            time_s, ids = time_s[kept], ids[kept]
        order = np.argsort(time_s, kind="stable")
        on_front = set(ids.tolist())
        shown = ids[order][thinned(time_s[order], MOST_ON_FRONT)].tolist()
        all_ids = ranked + [each for each in shown if each not in set(ranked)]
        return all_ids, [at for at, each in enumerate(all_ids) if each in on_front]

    def _different(self, ids: list[int]) -> list[int]:
        """The first `top` of ranked ids, variants of a plan that stands before them only where
        there are no others.
        """
        first: dict[tuple[Any, ...], int] = {}
        for each in ids:
            fields = self.cell(each)
            first.setdefault(
                tuple(value for name, value in fields.items() if name not in _VARIANTS), each
            )
            if len(first) == self.top:
                break
        chosen = set(first.values())
        spare = [each for each in ids if each not in chosen][: self.top - len(chosen)]
        return sorted(chosen.union(spare), key=ids.index)

    def cell(self, id_: int) -> dict[str, Any]:
        at = bisect_right(self.starts, id_) - 1
        return self.parts[at].fields(id_ - self.starts[at])


def _tables(
    scene: Scene, chosen: Axes, parts: list[Block], parameters: Mapping[str, Any], batch: int
) -> Iterator[tuple[Block, Table]]:
    """A table for each part, its columns on as few axes as they lie on; terms follow NumPy's
    broadcasting.
    """
    if not parts:
        return
    fixed, constants = chosen.constants, constant_plan(batch, chosen)
    entry, seq_len = scene.device or scene.cluster.entry, scene.workload.seq_len
    common: dict[str, Any] = {
        name: np.float64(value) for name, value in model_columns(scene.model).items()
    }
    by_precision = []
    for precision in parts[0].precision:
        plan = constants.model_copy(update={"precision": precision})
        by_precision.append(
            {
                **device_columns(entry, scene.cluster, precision),
                **scene.framework.columns(plan, scene.model),
            }
        )
    for name in by_precision[0]:
        values = np.array([each[name] for each in by_precision], float)
        common[name] = values[0] if (values == values[0]).all() else values.reshape(-1, 1, 1, 1, 1)
    common |= {"tokens": scene.workload.tokens or 0.0, **parameters}
    layers = fixed.get("stage_layers")
    for part in parts:
        columns, n = {**common, **part.columns(constants, seq_len)}, len(part.rows["dp"])
        stages = (
            stage_columns(columns, n, given_layers=[layers] * n)
            if layers
            else probe_columns(columns, n)
        )
        columns |= {
            name: value.reshape(-1, 1, 1, 1, 1, 1, n) if value.ndim > 1 else value
            for name, value in stages.items()
        }
        yield part, Table(columns, n)


def _request(scene: Scene, chosen: Axes, fields: dict[str, Any], batch: int) -> Request:
    cluster = scene.cluster
    if (fields["nodes"], fields["devices_per_node"]) != (cluster.nodes, cluster.devices_per_node):
        changes = {"nodes": fields["nodes"], "devices_per_node": fields["devices_per_node"]}
        cluster = ClusterSpec.from_dict({**cluster.to_dict(), **changes})
    return replace(scene, cluster=cluster).request(plan_of(fields, batch, chosen))


def _not_the_devices(singles: Mapping[str, Any], devices: int) -> Problem | None:
    """Fixed degrees that no choice of the others makes up to the number of devices."""
    degrees = {name: singles[name] for name in ("dp", "tp", "pp", "cp") if name in singles}
    product = math.prod(degrees.values())
    if devices % product == 0 and (len(degrees) < 4 or product == devices):
        return None
    name, value = max(degrees.items(), key=lambda each: (devices % each[1] != 0, each[1]))
    words = " x ".join(f"{each} {number}" for each, number in degrees.items())
    words += f" = {product}" if len(degrees) > 1 else ""
    rest = devices // math.gcd(devices, product // value)
    message = f"{words} does not go into {devices} devices"
    return problem(f"fix.{name}", message, f"{name} {nearest_divisor(rest, value)}")


def _why_none(scene: Scene, chosen: Axes, batch: int, rejected: Counter[str]) -> list[Problem]:
    """Why no plan is legal: the fixed fields' own problems, else what ruled most candidates out."""
    devices = scene.cluster.devices
    if scene.model.position == "learned" and scene.workload.seq_len > scene.model.max_seq_len:
        plan = ParallelPlan(dp=1)
        return [*plan_problems(plan, model=scene.model, seq_len=scene.workload.seq_len)]
    singles = {
        name: values[0]
        for name, values in chosen.given.items()
        if len(values) == 1 and name != DEVICES
    }
    plan = ParallelPlan.from_dict({**chosen.constants, **singles, "global_batch_size": batch})
    found = [
        each.model_copy(
            update={"field": f"fix.{each.field}" if each.field in singles else each.field}
        )
        for each in plan_problems(
            plan, model=scene.model, seq_len=scene.workload.seq_len, within=devices, field=""
        )
        if each.field in singles
    ]
    if found:
        return found
    if DEVICES not in chosen.given and (apart := _not_the_devices(singles, devices)):
        return [apart]
    reasons = [reason for reason, _ in rejected.most_common(3)]
    message = f"no legal plan lays {batch} sequences of {scene.model.name} over {devices} devices"
    if reasons:
        message += f" ({'; '.join(reasons)})"
    many = f"{devices} sequences, " if devices < 2**31 else ""
    return [
        problem(
            "workload.global_batch_size", message, f"{many}fewer devices, or fewer fixed fields"
        )
    ]
