"""Ranks every legal plan: computes memory and time, the best by an objective, the Pareto front.

Combines enumeration and terms; has no formula of its own.
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
from orchestrator.planner.model.columns.stage_columns import stage_columns
from orchestrator.planner.model.inputs import Request, device_columns, run_columns, table_of
from orchestrator.planner.model.memory.representative_ranks import probe_columns
from orchestrator.planner.model.terms import Table
from orchestrator.planner.plan_request import Scenario
from orchestrator.planner.search.axes import DEVICES, Axes, build_axes
from orchestrator.planner.search.degrees import MOST_CANDIDATES
from orchestrator.planner.search.enumeration import enumerate_plans
from orchestrator.planner.search.grid import Block, constant_plan, plan_of
from orchestrator.planner.search.pareto import Front, TopRows, thinned, undominated
from workers.contracts.base import Problem, Refused, problem
from workers.contracts.specs.cluster import ClusterSpec
from workers.contracts.specs.legality import plan_problems
from workers.contracts.specs.plan import ParallelPlan
from workers.contracts.specs.plan_rules.rule import nearest_divisor

Objective = Literal["time", "cost", "memory"]
# the first term ranks; the others break ties
_ORDER: dict[str, tuple[str, ...]] = {
    "time": ("step_time_s", "total_bytes"),
    "cost": ("usd_per_billion_tokens", "step_time_s", "total_bytes"),
    "memory": ("total_bytes", "step_time_s"),
}
# plans per table: with fewer, calls cost more than arithmetic; with more, columns leave the cache
_CELLS = 2**17
MOST_ON_FRONT = 48
# plans that differ only in these are shown once, with their best values, while others remain
_VARIANTS = frozenset({"virtual_stages", "prefetch_layers", "dp_replicate"})
_CANDIDATES_PER_PLAN = 12


@dataclass(frozen=True)
class SearchResult:
    """The result of a search. `enumerated` counts legal plans, all evaluated; `fit` those that fit.

    `requests` are ranked best first; variants that differ only in virtual stages, prefetch or
    copies appear once. The Pareto front follows; `pareto` holds its indices. `table` holds their
    terms with every pipeline stage. `closest` is the plan with the least memory if none fits.
    `problems` say why no plan is legal.
    """

    enumerated: int
    legal: int
    fit: int
    seconds: float
    requests: list[Request]
    table: Table | None
    pareto: list[int]
    rejected: dict[str, int]
    notes: list[str] = field(default_factory=list)
    problems: list[Problem] = field(default_factory=list)
    closest: Request | None = None

    @property
    def plans(self) -> list[ParallelPlan]:
        """The plans of `requests`."""
        return [request.plan for request in self.requests]


def rank_plans(
    scenario: Scenario,
    *,
    fix: Mapping[str, Any] | None = None,
    parameters: Mapping[str, Any],
    objective: Objective = "time",
    top: int = 20,
    most: int = MOST_CANDIDATES,
) -> SearchResult:
    """The best plans for the scenario's global batch.

    `fix` maps a plan field to a value or a list of values, and `devices` to a number or "any".
    `parameters` holds the calibratable parameters as scalars. Raises Refused if `fix` is invalid or
    the search is too large.
    """
    started = time.perf_counter()
    if objective not in _ORDER:
        raise Refused(
            f"{objective!r} is not an objective",
            f"Use one of {', '.join(_ORDER)}.",
            field="objective",
        )
    batch = scenario.workload.global_batch_size
    if batch is None:
        raise Refused(
            "a search needs the number of sequences per step",
            "Use workload.global_batch_size 512.",
            field="workload",
        )
    entry = scenario.device or scenario.cluster.entry
    chosen = build_axes(fix, scenario.cluster, entry)
    space = enumerate_plans(
        scenario.model, scenario.cluster, scenario.workload.seq_len, batch, chosen, most=most
    )
    rejected = Counter(space.rejected)
    ranking = _Ranking(objective, top)
    for block, table in _tables(scenario, chosen, list(space.parts(_CELLS)), parameters, batch):
        ranking.add(block, table)
    if space.size > ranking.fit:
        rejected["memory: does not fit"] = space.size - ranking.fit
    ids, front = ranking.select()
    requests = [_request(scenario, chosen, ranking.fields(id_), batch) for id_ in ids]
    problems = [] if space.size else _no_legal_plan(scenario, chosen, batch, rejected)
    closest = None
    if space.size and not ranking.fit:
        closest = _request(scenario, chosen, ranking.fields(int(ranking.smallest.ids[0])), batch)
    return SearchResult(
        enumerated=space.size,
        legal=space.size,
        fit=ranking.fit,
        seconds=time.perf_counter() - started,
        requests=requests,
        table=table_of(requests, parameters) if requests else None,
        pareto=front,
        rejected=dict(rejected.most_common()),
        notes=list(space.notes),
        problems=problems,
        closest=closest,
    )


class _Ranking:
    """The plans added so far: counts, the best, one front per number of devices, the smallest."""

    def __init__(self, objective: Objective, top: int) -> None:
        self.order = _ORDER[objective]
        self.top = max(1, top)
        self.best, self.smallest = (
            TopRows(self.top * _CANDIDATES_PER_PLAN if top > 1 else 1),
            TopRows(1),
        )
        self.fronts: dict[int, Front] = {}
        self.blocks: list[Block] = []
        self.starts: list[int] = []
        self.seen = self.fit = 0

    def add(self, block: Block, table: Table) -> None:
        """Adds a block of plans and the table of their terms."""
        shape, start = block.shape, self.seen
        self.blocks.append(block)
        self.starts.append(start)
        self.seen += block.cells
        fits = np.broadcast_to(table["fits"], shape)
        if block.legal is not None:
            fits = fits & block.legal
        number = int(fits.sum())
        self.fit += number
        if not number:
            if not self.fit:
                total = np.broadcast_to(table["total_bytes"], shape)
                total = total if block.legal is None else np.where(block.legal, total, np.inf)
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
        devices = block.rows["nodes"] * block.rows["devices_per_node"]
        if (devices == devices[0]).all():
            self._front(int(devices[0])).add(time_s, bytes_, ids)
            return
        cell_devices = devices[cells % len(devices)]
        for number in np.unique(cell_devices).tolist():
            mask = cell_devices == number
            self._front(number).add(time_s[mask], bytes_[mask], ids[mask])

    def _front(self, devices: int) -> Front:
        return self.fronts.setdefault(devices, Front())

    def select(self) -> tuple[list[int], list[int]]:
        """Ids of the plans to show, ranked ones first, and the indices of those on the front.

        With one price per device-hour, cost follows from time and devices, and headroom from
        memory: the front over time, cost, headroom and devices is that over time, memory, devices.
        """
        ranked = self._without_variants(self.best.ids.tolist())
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
            rows = undominated([time_s, bytes_, number])
            time_s, ids = time_s[rows], ids[rows]
        order = np.argsort(time_s, kind="stable")
        on_front = set(ids.tolist())
        shown = ids[order][thinned(time_s[order], MOST_ON_FRONT)].tolist()
        all_ids = ranked + [id_ for id_ in shown if id_ not in set(ranked)]
        return all_ids, [index for index, id_ in enumerate(all_ids) if id_ in on_front]

    def _without_variants(self, ids: list[int]) -> list[int]:
        """The first `top` ranked ids; variants of a better plan only if there are no others."""
        first: dict[tuple[Any, ...], int] = {}
        for id_ in ids:
            fields = self.fields(id_)
            key = tuple(value for name, value in fields.items() if name not in _VARIANTS)
            first.setdefault(key, id_)
            if len(first) == self.top:
                break
        chosen = set(first.values())
        spare = [id_ for id_ in ids if id_ not in chosen][: self.top - len(chosen)]
        return sorted(chosen.union(spare), key=ids.index)

    def fields(self, id_: int) -> dict[str, Any]:
        """The plan fields of an id."""
        block = bisect_right(self.starts, id_) - 1
        return self.blocks[block].fields(id_ - self.starts[block])


def _tables(
    scenario: Scenario, chosen: Axes, blocks: list[Block], parameters: Mapping[str, Any], batch: int
) -> Iterator[tuple[Block, Table]]:
    """One table per block; each column spans only the axes it depends on and broadcasts."""
    if not blocks:
        return
    fixed, constants = chosen.constants, constant_plan(batch, chosen)
    entry, seq_len = scenario.device or scenario.cluster.entry, scenario.workload.seq_len
    common: dict[str, Any] = {
        name: np.float64(value)
        for name, value in run_columns(
            scenario.model, scenario.train, seq_len, scenario.second
        ).items()
    }
    by_precision = []
    for precision in blocks[0].precision:
        plan = constants.model_copy(update={"precision": precision})
        by_precision.append(
            {
                **device_columns(entry, scenario.cluster, precision),
                **scenario.framework.columns(plan, scenario.model),
            }
        )
    for name in by_precision[0]:
        values = np.array([item[name] for item in by_precision], float)
        common[name] = values[0] if (values == values[0]).all() else values.reshape(-1, 1, 1, 1, 1)
    common |= {
        "tokens": scenario.workload.tokens or 0.0,
        "trained_share": scenario.workload.trained_share,
        **parameters,
    }
    layers = fixed.get("stage_layers")
    for block in blocks:
        columns, n = {**common, **block.columns(constants, seq_len)}, len(block.rows["dp"])
        stages = (
            stage_columns(columns, n, given_layers=[layers] * n)
            if layers
            else probe_columns(columns, n)
        )
        columns |= {
            name: value.reshape(-1, 1, 1, 1, 1, 1, n) if value.ndim > 1 else value
            for name, value in stages.items()
        }
        yield block, Table(columns, n)


def _request(scenario: Scenario, chosen: Axes, fields: dict[str, Any], batch: int) -> Request:
    cluster = scenario.cluster
    if (fields["nodes"], fields["devices_per_node"]) != (cluster.nodes, cluster.devices_per_node):
        changes = {"nodes": fields["nodes"], "devices_per_node": fields["devices_per_node"]}
        cluster = ClusterSpec.from_dict({**cluster.to_dict(), **changes})
    return replace(scenario, cluster=cluster).request(plan_of(fields, batch, chosen))


def _degrees_problem(singles: Mapping[str, Any], devices: int) -> Problem | None:
    """Fixed degrees whose product cannot be completed to the number of devices."""
    degrees = {name: singles[name] for name in ("dp", "tp", "pp", "cp") if name in singles}
    product = math.prod(degrees.values())
    if devices % product == 0 and (len(degrees) < 4 or product == devices):
        return None
    name, value = max(degrees.items(), key=lambda item: (devices % item[1] != 0, item[1]))
    text = " x ".join(f"{key} {number}" for key, number in degrees.items())
    text += f" = {product}" if len(degrees) > 1 else ""
    rest = devices // math.gcd(devices, product // value)
    message = f"{text} does not divide {devices} devices"
    return problem(f"fix.{name}", message, f"Use {name} {nearest_divisor(rest, value)}.")


def _no_legal_plan(
    scenario: Scenario, chosen: Axes, batch: int, rejected: Counter[str]
) -> list[Problem]:
    """Why no plan is legal: problems of the fixed fields, else the most frequent reasons."""
    devices = scenario.cluster.devices
    if (
        scenario.model.position == "learned"
        and scenario.workload.seq_len > scenario.model.max_seq_len
    ):
        plan = ParallelPlan(dp=1)
        return [*plan_problems(plan, model=scenario.model, seq_len=scenario.workload.seq_len)]
    singles = {
        name: values[0]
        for name, values in chosen.fixed.items()
        if len(values) == 1 and name != DEVICES
    }
    plan = ParallelPlan.from_dict({**chosen.constants, **singles, "global_batch_size": batch})
    problems = [
        item.model_copy(update={"field": f"fix.{item.field}"})
        for item in plan_problems(
            plan, model=scenario.model, seq_len=scenario.workload.seq_len, within=devices, field=""
        )
        if item.field in singles
    ]
    if problems:
        return problems
    if DEVICES not in chosen.fixed and (degrees := _degrees_problem(singles, devices)):
        return [degrees]
    reasons = [reason for reason, _ in rejected.most_common(3)]
    message = f"no legal plan runs {batch} sequences of {scenario.model.name} on {devices} devices"
    if reasons:
        message += f" ({'; '.join(reasons)})"
    many = f"{devices} sequences, " if devices < 2**31 else ""
    return [
        problem(
            "workload.global_batch_size",
            message,
            f"Use {many}fewer devices, or fewer fixed fields.",
        )
    ]
