"""The legal factorizations of the devices into dp, tp, pp and cp."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sized

import numpy as np

from orchestrator.planner.model.columns.codes import SCHEDULE
from orchestrator.planner.search.axes import DEVICES, Axes, divisors
from orchestrator.planner.search.grid import Rows
from orchestrator.planner.search.legality_masks import illegal
from workers.contracts.base import Refused
from workers.contracts.specs.cluster import ClusterSpec
from workers.contracts.specs.model import ModelSpec

MOST_CANDIDATES = 5_000_000
MAX_RANKS = 2**16  # of one axis, the contract's limit
_MOST_DEGREES = 2_000_000
_SPANS_NODES = "tp: spans nodes; fix tp to include it"


def too_many_plans(number: int, axes: Axes, *, at_least: bool = False) -> Refused:
    """The error of a search with this number of candidates; names fields that a user may fix."""
    free = [
        name
        for name in ("micro_batch_size", "pp", "cp", "tp", "schedule", "recompute")
        if name not in axes.fixed
    ]
    more = "more than " if at_least else ""
    return Refused(
        f"the search has {more}{number:,} plans, the limit is {MOST_CANDIDATES:,}",
        f"Fix {' and '.join(free[:2])}." if free else "Use a smaller cluster or batch.",
        field=f"fix.{free[0]}" if free else "cluster",
    )


def _device_numbers(cluster: ClusterSpec, axes: Axes) -> list[tuple[int, int]]:
    """`(nodes, devices per node)`: the full cluster; for any number, halves down to one device."""
    nodes, per_node = cluster.nodes, cluster.devices_per_node
    numbers = axes.fixed.get(DEVICES)
    if numbers is None:
        return [(nodes, per_node)]
    if axes.any_devices:
        return [(half, per_node) for half in _halves(nodes)] + [
            (1, half) for half in _halves(per_node)[1:]
        ]
    sizes = []
    for number in numbers:
        if number % per_node == 0 and number // per_node <= nodes:
            sizes.append((number // per_node, per_node))
        elif number <= per_node:
            sizes.append((1, number))
        else:
            raise Refused(
                f"{number} devices do not fill nodes of {per_node}, or exceed the cluster's "
                f"{cluster.devices}",
                f"Use a multiple of {per_node}, at most {nodes * per_node}.",
                field="fix.devices",
            )
    return sizes


def _halves(number: int) -> list[int]:
    halves = [number]
    while halves[-1] % 2 == 0:
        halves.append(halves[-1] // 2)
    return halves


def legal_degrees(
    model: ModelSpec,
    cluster: ClusterSpec,
    seq_len: int,
    global_batch: int,
    axes: Axes,
    rejected: Counter[str],
) -> Rows:
    """All factorizations of the devices into dp x tp x pp x cp whose degrees are legal.

    Counts each other factorization once in `rejected`. Refuses a request with too many plans.
    """
    rows: list[tuple[int, ...]] = []
    for nodes, per_node in _device_numbers(cluster, axes):
        devices = nodes * per_node
        for tp in (degree for degree in divisors(devices) if axes.allows("tp", degree)):
            if per_node % tp and "tp" not in axes.fixed:
                rejected[_SPANS_NODES] += _count_factorizations(devices // tp, 3)
                continue
            reasons = illegal(_single_plan(tp=tp), model=model)
            if reasons:
                rejected[next(iter(reasons))] += _count_factorizations(devices // tp, 3)
                continue
            for pp in (degree for degree in divisors(devices // tp) if axes.allows("pp", degree)):
                rest = devices // tp // pp
                if pp > model.layers:
                    rejected["pp: more stages than layers"] += _count_factorizations(rest, 2)
                    continue
                for cp in (degree for degree in divisors(rest) if axes.allows("cp", degree)):
                    dp = rest // cp
                    if not axes.allows("dp", dp):
                        continue
                    if max(dp, cp) > MAX_RANKS:
                        rejected[
                            f"dp: more than the {MAX_RANKS:,} ranks that an axis may have"
                        ] += 1
                    elif seq_len % cp:
                        rejected["cp: does not divide the sequence"] += 1
                    elif global_batch % dp:
                        rejected["global_batch_size: does not divide by micro_batch_size x dp"] += 1
                    else:
                        rows.append((nodes, per_node, dp, tp, pp, cp))
                if len(rows) > _MOST_DEGREES:
                    raise too_many_plans(len(rows) * plans_per_row(axes), axes, at_least=True)
    names = ("nodes", "devices_per_node", "dp", "tp", "pp", "cp")
    columns = np.array(rows, np.int64).reshape(-1, len(names))
    return {name: columns[:, index] for index, name in enumerate(names)}


def _single_plan(**changes: int) -> dict[str, int]:
    plan = {
        "dp": 1,
        "tp": 1,
        "pp": 1,
        "cp": 1,
        "ep": 1,
        "zero": 0,
        "sequence_parallel": 0,
        "schedule": SCHEDULE["1f1b"],
        "virtual_stages": 1,
        "micro_batch": 1,
        "global_batch": 1,
    }
    return {**plan, **changes}


def _count_factorizations(number: int, parts: int) -> int:
    """The number of ordered factorizations into `parts` factors.

    C(e + parts - 1, parts - 1) per prime with exponent e.
    """
    count, prime = 1, 2
    while number > 1:
        if prime * prime > number:
            prime = number
        exponent = 0
        while number % prime == 0:
            number, exponent = number // prime, exponent + 1
        for more in range(1, parts):
            count = count * (exponent + more) // more if more == 1 or exponent else count
        prime += 1
    return count


def plans_per_row(axes: Axes) -> int:
    """Combinations of the axes that do not depend on the degrees."""
    lists: tuple[Sized, ...] = (
        axes.sharding,
        axes.recompute,
        axes.offload,
        axes.precision,
        axes.sequence_parallel,
    )
    return math.prod([len(values) for values in lists])
