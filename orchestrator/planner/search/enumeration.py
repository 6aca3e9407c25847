"""Enumerates all legal plans as blocks of columns and counts each rejected plan by its reason.

Rows hold degrees, schedule, micro-batch and copies, which depend on each other. Does not depend on
memory or time.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from orchestrator.planner.model.columns.codes import SCHEDULE
from orchestrator.planner.search.axes import Axes, divisors
from orchestrator.planner.search.degrees import (
    MAX_RANKS,
    MOST_CANDIDATES,
    legal_degrees,
    plans_per_row,
    too_many_plans,
)
from orchestrator.planner.search.grid import Block, Rows, Space
from orchestrator.planner.search.legality_masks import illegal
from workers.contracts.specs.cluster import ClusterSpec
from workers.contracts.specs.model import ModelSpec

REFUSED_ABOVE = 1_000_000_000
# groups with fewer plans share a table: its overhead exceeds that of their illegal plans
_SMALL = 2**15


def enumerate_plans(
    model: ModelSpec,
    cluster: ClusterSpec,
    seq_len: int,
    global_batch: int,
    axes: Axes,
    *,
    most: int = MOST_CANDIDATES,
) -> Space:
    """Every legal plan of `global_batch` sequences on the full cluster (or any number of devices).

    A search of more than `most` plans excludes the least promising ones in the order of
    `Axes.coarser`, with a note. Raises Refused with the axis to fix if there are still too many.
    """
    rejected: Counter[str] = Counter()
    degrees = legal_degrees(model, cluster, seq_len, global_batch, axes, rejected)
    number = total = _count(model, global_batch, axes, degrees)
    notes: list[str] = []
    if total > REFUSED_ABOVE:
        raise too_many_plans(total, axes)
    for name, message, coarser in axes.coarser():
        if number <= most:
            break
        axes = coarser
        if axes.most_cp is not None:
            degrees = {
                key: column[degrees["cp"] <= axes.most_cp] for key, column in degrees.items()
            }
        fewer = _count(model, global_batch, axes, degrees)
        if fewer < number:
            rejected[f"{name}: excluded to limit the search, {message}"] += number - fewer
            notes.append(message)
        number = fewer
    if number > most:
        raise too_many_plans(total, axes)
    if notes:
        notes = [
            f"The search has {total:,} plans, so it excludes {', '.join(notes)}. Fix an axis to "
            "include all of its values."
        ]
    rows = _expand(model, global_batch, axes, degrees)
    return Space(
        tuple(_blocks(rows, model, seq_len, global_batch, axes, rejected)), rejected, tuple(notes)
    )


# an axis that depends on others: its names, the columns it depends on, and its values as tuples
_DependentAxis = tuple[tuple[str, ...], tuple[str, ...], Callable[..., Sequence[tuple[int, ...]]]]


def _dependent_axes(model: ModelSpec, global_batch: int, axes: Axes) -> list[_DependentAxis]:
    def experts(dp: int, cp: int) -> list[tuple[int]]:
        if "ep" in axes.fixed:
            return [(degree,) for degree in axes.fixed["ep"]]
        most = min(model.moe.experts, MAX_RANKS) if model.moe else 1
        return [
            (degree,)
            for degree in divisors(dp * cp)
            if degree <= most and (model.moe is None or model.moe.experts % degree == 0)
        ]

    def schedules(pp: int) -> list[tuple[int, int]]:
        names = axes.schedules(pp)
        return [
            (SCHEDULE[name], chunks)
            for name in names
            for chunks in axes.chunks(name, pp, model.layers)
        ]

    def micro_batches(dp: int) -> list[tuple[int]]:
        return [(size,) for size in axes.micro_batches(global_batch // dp)]

    def copies(dp: int, tp: int, cp: int, devices_per_node: int) -> list[tuple[int]]:
        return [(count,) for count in axes.copies(dp, tp * cp, devices_per_node)]

    return [
        (("ep",), ("dp", "cp"), experts),
        (("schedule", "virtual_stages"), ("pp",), schedules),
        (("micro_batch",), ("dp",), micro_batches),
        (("dp_replicate",), ("dp", "tp", "cp", "devices_per_node"), copies),
    ]


def _options(
    degrees: Rows, axis: _DependentAxis
) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
    """Values of a dependent axis for all degrees, concatenated `(total, names)`.

    Also the start and the number of values of each row of degrees.
    """
    names, keys, values = axis
    table: list[tuple[int, ...]] = []
    ranges: dict[tuple[int, ...], tuple[int, int]] = {}
    index = []
    for key in zip(*(degrees[name].tolist() for name in keys), strict=True):
        if key not in ranges:
            options = values(*key)
            ranges[key] = (len(table), len(options))
            table += options
        index.append(ranges[key])
    where = np.array(index, np.int64).reshape(-1, 2)
    return np.array(table, np.int64).reshape(-1, len(names)), where[:, 0], where[:, 1]


def _count(model: ModelSpec, global_batch: int, axes: Axes, degrees: Rows) -> int:
    """An upper bound of the number of candidates, as a Python integer, which does not overflow."""
    numbers: list[list[int]] = [
        _options(degrees, axis)[2].tolist() for axis in _dependent_axes(model, global_batch, axes)
    ]
    rows: int = sum(math.prod(row) for row in zip(*numbers, strict=True))
    return rows * plans_per_row(axes)


def _expand(model: ModelSpec, global_batch: int, axes: Axes, degrees: Rows) -> Rows:
    """Degrees times their dependent axes, including illegal combinations."""
    dependent = _dependent_axes(model, global_batch, axes)
    options = [_options(degrees, axis) for axis in dependent]
    numbers = np.ones(len(degrees["dp"]), np.int64)
    for _, _, number in options:
        numbers = numbers * number
    source = np.repeat(np.arange(len(numbers)), numbers)
    within = np.arange(int(numbers.sum())) - np.repeat(np.cumsum(numbers) - numbers, numbers)
    rows = {name: column[source] for name, column in degrees.items()}
    for (names, _, _), (table, start, number) in zip(dependent, options, strict=True):
        within, offset = np.divmod(within, number[source])
        chosen = table[start[source] + offset]
        rows |= {name: chosen[:, index] for index, name in enumerate(names)}
    # sort by number of distinct ranks: the most varied plan determines the height of a table
    kinds = np.minimum(rows["pp"], 3) + (model.layers % (rows["pp"] * rows["virtual_stages"]) > 0)
    order = np.argsort(kinds, kind="stable")
    return {name: column[order] for name, column in rows.items()}


def _blocks(
    rows: Rows,
    model: ModelSpec,
    seq_len: int,
    global_batch: int,
    axes: Axes,
    rejected: Counter[str],
) -> Iterator[Block]:
    """Blocks of rows that share their legal choices of sharding and sequence parallelism."""
    sharding, sequence = axes.sharding, axes.sequence_parallel
    plans_per_cell = len(axes.recompute) * len(axes.offload) * len(axes.precision)
    if not len(rows["dp"]) or not sharding:
        return
    grid = {name: column[None, None, :] for name, column in rows.items()} | _constants(axes)
    grid["global_batch"] = np.int64(global_batch)
    grid["zero"] = np.array([zero for zero, _ in sharding])[:, None, None]
    grid["sequence_parallel"] = np.array(sequence, np.int64)[None, :, None]
    shape = (len(sharding), len(sequence), len(rows["dp"]))
    excluded = np.zeros(shape, bool)
    reasons = illegal(grid, model=model, seq_len=seq_len)
    for reason, mask in {**reasons, **_redundant(grid, axes)}.items():
        mask = np.broadcast_to(mask, shape) & ~excluded
        if mask.any():
            rejected[reason] += int(mask.sum()) * plans_per_cell
            excluded |= mask
    yield from _group_rows(rows, ~excluded, axes, plans_per_cell)


def _group_rows(
    rows: Rows, legal: NDArray[np.bool_], axes: Axes, plans_per_cell: int
) -> Iterator[Block]:
    """Fully legal blocks for large groups with equal choices, one masked block for the rest."""
    choices = legal.shape[0] * legal.shape[1]
    weight = 1 << np.arange(min(choices, 62), dtype=np.int64)
    code = weight @ legal.reshape(choices, -1)[:62]
    rest: NDArray[np.bool_] = np.zeros(code.shape, bool)
    for value, number in zip(*np.unique(code[code > 0], return_counts=True), strict=True):
        same = code == value
        chosen = legal[:, :, int(same.argmax())]
        if number * choices * plans_per_cell < _SMALL or choices > 62:
            rest |= same
            continue
        selected = {name: column[same] for name, column in rows.items()}
        # each choice of sequence parallelism has a set of legal shardings; group equal sets
        for allowed in dict.fromkeys(map(tuple, chosen.T.tolist())):
            if any(allowed):
                sequences = [
                    value
                    for value, mask in zip(axes.sequence_parallel, chosen.T, strict=True)
                    if tuple(mask) == allowed
                ]
                shardings = [value for value, ok in zip(axes.sharding, allowed, strict=True) if ok]
                yield Block(
                    selected,
                    axes.offload,
                    axes.precision,
                    tuple(shardings),
                    axes.recompute,
                    tuple(sequences),
                )
    if choices > 62:
        rest = np.asarray(legal.any(axis=(0, 1)))
    if rest.any():
        selected = {name: column[rest] for name, column in rows.items()}
        mask = legal[None, None, :, None, :, :][..., rest]
        yield Block(
            selected,
            axes.offload,
            axes.precision,
            axes.sharding,
            axes.recompute,
            axes.sequence_parallel,
            mask,
        )


def _constants(axes: Axes) -> dict[str, Any]:
    fixed = axes.constants
    layers = fixed.get("stage_layers")
    return {
        "weight_stashing": np.int64(bool(fixed.get("weight_stashing"))),
        "vertical_sync": np.int64(bool(fixed.get("vertical_sync"))),
        "budget_without_auto": np.int64(
            fixed.get("recompute_budget_bytes") is not None and "auto" not in axes.recompute
        ),
        "stage_entries": np.int64(-1 if layers is None else len(layers)),
        "stage_sum": np.int64(-1 if layers is None else sum(layers)),
    }


def _redundant(c: dict[str, Any], axes: Axes) -> dict[str, Any]:
    """Legal plans that equal another one, excluded unless the field is fixed."""
    masks = {
        "sequence_parallel": (
            "no effect at tp 1",
            (c["sequence_parallel"] > 0) & (c["tp"] == 1),
        ),
        "zero": ("no effect at dp x cp 1", (c["zero"] > 0) & (c["dp"] * c["cp"] == 1)),
        "dp_replicate": (
            "no effect at zero 0",
            (c["dp_replicate"] > 0) & (c["zero"] == 0),
        ),
    }
    return {
        f"{name}: {message}": mask
        for name, (message, mask) in masks.items()
        if name not in axes.fixed
    }
