"""All legal plans of a model on a cluster, as blocks of columns; what is left out is counted with
its reason.

Rows hold degrees, schedule, micro-batch and copies, which depend on each other. Knows no bytes and
no seconds.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence, Sized
from typing import Any

import numpy as np
from numpy.typing import NDArray

from orchestrator.planner.model.grid import Block, Rows, Space
from orchestrator.planner.model.inputs import SCHEDULE
from orchestrator.planner.search.axes import DEVICES, Axes, divisors
from orchestrator.planner.search.legality import illegal
from workers.contracts.base import Refused
from workers.contracts.specs.cluster import ClusterSpec
from workers.contracts.specs.model import ModelSpec

MOST_CANDIDATES = 5_000_000
MOST_RANKS = 2**16  # of one axis, as the contract bounds them
REFUSED_ABOVE = 1_000_000_000
# plans of a group of rows below which a table of their own costs more than illegal neighbours
_SMALL = 2**15
_MOST_DEGREES = 2_000_000
_NODES = "tp: spans nodes, ask for it to see it"


def enumerate_plans(
    model: ModelSpec,
    cluster: ClusterSpec,
    seq_len: int,
    global_batch: int,
    axes: Axes,
    *,
    most: int = MOST_CANDIDATES,
) -> Space:
    """Every legal plan of `global_batch` sequences on the whole cluster (or on `axes.any_devices`
    of it).

    A search of more than `most` plans leaves out, in the order of `Axes.coarser`, what is least
    likely to win, and says
    so. Raises Refused where even that would be too many, naming the axis to fix.
    """
    rejected: Counter[str] = Counter()
    degrees = _degrees(model, cluster, seq_len, global_batch, axes, rejected)
    number = whole = _count(model, global_batch, axes, degrees)
    notes: list[str] = []
    if whole > REFUSED_ABOVE:
        raise _too_many(whole, axes)
    for name, message, coarser in axes.coarser():
        if number <= most:
            break
        axes = coarser
        if axes.most_cp is not None:
            degrees = {
                each: column[degrees["cp"] <= axes.most_cp] for each, column in degrees.items()
            }
        fewer = _count(model, global_batch, axes, degrees)
        if fewer < number:
            rejected[f"{name}: left out for size, {message}"] += number - fewer
            notes.append(message)
        number = fewer
    if number > most:
        raise _too_many(whole, axes)
    if notes:
        left_out = ", ".join(notes)
        notes = [
            (
                f"The search would look at {whole:,} plans, so it leaves out {left_out}; fix an "
                "axis "
                "to see all of it."
            )
        ]
    rows = _expand(model, global_batch, axes, degrees)
    return Space(
        tuple(_blocks(rows, model, seq_len, global_batch, axes, rejected)), rejected, tuple(notes)
    )


def _too_many(number: int, axes: Axes, *, at_least: bool = False) -> Refused:
    free = [
        name
        for name in ("micro_batch_size", "pp", "cp", "tp", "schedule", "recompute")
        if name not in axes.given
    ]
    more = "more than " if at_least else ""
    return Refused(
        f"the search would enumerate {more}{number:,} plans, at most {MOST_CANDIDATES:,} are "
        "looked at in one search",
        f"fix {' and '.join(free[:2])}" if free else "a smaller cluster or batch",
        field=f"fix.{free[0]}" if free else "cluster",
    )


def _device_numbers(cluster: ClusterSpec, axes: Axes) -> list[tuple[int, int]]:
    """`(nodes, devices a node)`: the whole cluster; where any number will do, halves of it down to
    one device.
    """
    whole = (cluster.nodes, cluster.devices_per_node)
    wanted = axes.given.get(DEVICES)
    if wanted is None:
        return [whole]
    found = [(nodes, whole[1]) for nodes in _halves(whole[0])] + [
        (1, each) for each in _halves(whole[1])[1:]
    ]
    if axes.any_devices:
        return found
    sizes = []
    for number in wanted:
        if number % whole[1] == 0 and number // whole[1] <= whole[0]:
            sizes.append((number // whole[1], whole[1]))
        elif number <= whole[1]:
            sizes.append((1, number))
        else:
            raise Refused(
                f"{number} devices are not whole nodes of {whole[1]}, or more than the cluster's "
                f"{cluster.devices}",
                f"{max(1, min(number // whole[1], whole[0])) * whole[1]}",
                field="fix.devices",
            )
    return sizes


def _halves(number: int) -> list[int]:
    found = [number]
    while found[-1] % 2 == 0:
        found.append(found[-1] // 2)
    return found


def _degrees(
    model: ModelSpec,
    cluster: ClusterSpec,
    seq_len: int,
    global_batch: int,
    axes: Axes,
    rejected: Counter[str],
) -> Rows:
    """Every way to write the devices as dp x tp x pp x cp that is legal by itself; each other one
    is counted once.
    """
    found: list[tuple[int, ...]] = []
    for nodes, per_node in _device_numbers(cluster, axes):
        devices = nodes * per_node
        for tp in (each for each in divisors(devices) if axes.allows("tp", each)):
            if per_node % tp and "tp" not in axes.given:
                rejected[_NODES] += _ways(devices // tp, 3)
                continue
            one = illegal(_single(tp=tp), model=model)
            if one:
                rejected[next(iter(one))] += _ways(devices // tp, 3)
                continue
            for pp in (each for each in divisors(devices // tp) if axes.allows("pp", each)):
                rest = devices // tp // pp
                if pp > model.layers:
                    rejected["pp: more stages than layers"] += _ways(rest, 2)
                    continue
                for cp in (each for each in divisors(rest) if axes.allows("cp", each)):
                    dp = rest // cp
                    if not axes.allows("dp", dp):
                        continue
                    if max(dp, cp) > MOST_RANKS:
                        rejected[
                            f"dp: more than the {MOST_RANKS:,} ranks that an axis may have"
                        ] += 1
                    elif seq_len % cp:
                        rejected["cp: does not divide the sequence"] += 1
                    elif global_batch % dp:
                        rejected["global_batch_size: does not divide by micro_batch_size x dp"] += 1
                    else:
                        found.append((nodes, per_node, dp, tp, pp, cp))
                if len(found) > _MOST_DEGREES:
                    raise _too_many(len(found) * _beside(axes), axes, at_least=True)
    names = ("nodes", "devices_per_node", "dp", "tp", "pp", "cp")
    columns = np.array(found, np.int64).reshape(-1, len(names))
    return {name: columns[:, at] for at, name in enumerate(names)}


def _single(**changes: int) -> dict[str, int]:
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


def _ways(number: int, parts: int) -> int:
    """In how many ways `number` is a product of `parts` ordered factors: C(e + parts - 1, parts -
    1) a prime.
    """
    ways, prime = 1, 2
    while number > 1:
        if prime * prime > number:
            prime = number
        exponent = 0
        while number % prime == 0:
            number, exponent = number // prime, exponent + 1
        for more in range(1, parts):
            ways = ways * (exponent + more) // more if more == 1 or exponent else ways
        prime += 1
    return ways


# an axis that depends on others: its name(s), what its values follow from, and the values as tuples
_Ragged = tuple[tuple[str, ...], tuple[str, ...], Callable[..., Sequence[tuple[int, ...]]]]


def _ragged(model: ModelSpec, global_batch: int, axes: Axes) -> list[_Ragged]:
    def experts(dp: int, cp: int) -> list[tuple[int]]:
        if "ep" in axes.given:
            return [(each,) for each in axes.given["ep"]]
        most = min(model.moe.experts, MOST_RANKS) if model.moe else 1
        return [
            (each,)
            for each in divisors(dp * cp)
            if each <= most and (model.moe is None or model.moe.experts % each == 0)
        ]

    def schedules(pp: int) -> list[tuple[int, int]]:
        names = axes.schedules(pp)
        return [
            (SCHEDULE[name], chunks)
            for name in names
            for chunks in axes.chunks(name, pp, model.layers)
        ]

    def micro_batches(dp: int) -> list[tuple[int]]:
        return [(each,) for each in axes.micro_batches(global_batch // dp)]

    def copies(dp: int, tp: int, cp: int, devices_per_node: int) -> list[tuple[int]]:
        return [(each,) for each in axes.copies(dp, tp * cp, devices_per_node)]

    return [
        (("ep",), ("dp", "cp"), experts),
        (("schedule", "virtual_stages"), ("pp",), schedules),
        (("micro_batch",), ("dp",), micro_batches),
        (("dp_replicate",), ("dp", "tp", "cp", "devices_per_node"), copies),
    ]


def _options(
    degrees: Rows, ragged: _Ragged
) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
    """Values of one such axis for all degrees end to end `(total, names)`; for each of them its
    start and number.
    """
    names, keys, values = ragged
    table: list[tuple[int, ...]] = []
    places: dict[tuple[int, ...], tuple[int, int]] = {}
    index = []
    for key in zip(*(degrees[name].tolist() for name in keys), strict=True):
        if key not in places:
            options = values(*key)
            places[key] = (len(table), len(options))
            table += options
        index.append(places[key])
    where = np.array(index, np.int64).reshape(-1, 2)
    return np.array(table, np.int64).reshape(-1, len(names)), where[:, 0], where[:, 1]


def _count(model: ModelSpec, global_batch: int, axes: Axes, degrees: Rows) -> int:
    """An upper bound of the candidates, from numbers of values alone; in Python's numbers, which do
    not overflow.
    """
    numbers: list[list[int]] = [
        _options(degrees, each)[2].tolist() for each in _ragged(model, global_batch, axes)
    ]
    rows: int = sum(math.prod(each) for each in zip(*numbers, strict=True))
    return rows * _beside(axes)


def _beside(axes: Axes) -> int:
    """Plans of one row."""
    lists: tuple[Sized, ...] = (
        axes.sharding,
        axes.recompute,
        axes.offload,
        axes.precision,
        axes.sequence_parallel,
    )
    return math.prod([len(each) for each in lists])


def _expand(model: ModelSpec, global_batch: int, axes: Axes, degrees: Rows) -> Rows:
    """Degrees times the axes that depend on them; illegal combinations are still among them."""
    ragged = _ragged(model, global_batch, axes)
    options = [_options(degrees, each) for each in ragged]
    numbers = np.ones(len(degrees["dp"]), np.int64)
    for _, _, number in options:
        numbers = numbers * number
    source = np.repeat(np.arange(len(numbers)), numbers)
    within = np.arange(int(numbers.sum())) - np.repeat(np.cumsum(numbers) - numbers, numbers)
    rows = {name: column[source] for name, column in degrees.items()}
    for (names, _, _), (table, start, number) in zip(ragged, options, strict=True):
        within, at = np.divmod(within, number[source])
        chosen = table[start[source] + at]
        rows |= {name: chosen[:, place] for place, name in enumerate(names)}
    # pipelines with as many kinds of ranks lie side by side: a table is as tall as the most varied
    # of its plans
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
    """Rows with the same legal choices of sharding and sequence parallelism side by side."""
    sharding, sequence = axes.sharding, axes.sequence_parallel
    beside = len(axes.recompute) * len(axes.offload) * len(axes.precision)
    if not len(rows["dp"]) or not sharding:
        return
    grid = {name: column[None, None, :] for name, column in rows.items()} | _constants(axes)
    grid["global_batch"] = np.int64(global_batch)
    grid["zero"] = np.array([zero for zero, _ in sharding])[:, None, None]
    grid["sequence_parallel"] = np.array(sequence, np.int64)[None, :, None]
    shape = (len(sharding), len(sequence), len(rows["dp"]))
    left = np.zeros(shape, bool)
    reasons = illegal(grid, model=model, seq_len=seq_len)
    for reason, mask in {**reasons, **_useless(grid, axes)}.items():
        mask = np.broadcast_to(mask, shape) & ~left
        if mask.any():
            rejected[reason] += int(mask.sum()) * beside
            left |= mask
    yield from _grouped(rows, ~left, axes, beside)


def _grouped(rows: Rows, legal: NDArray[np.bool_], axes: Axes, beside: int) -> Iterator[Block]:
    """Blocks in which all is legal for the large groups of rows with the same choices, one with a
    mask for the rest.
    """
    choices = legal.shape[0] * legal.shape[1]
    weight = 1 << np.arange(min(choices, 62), dtype=np.int64)
    code = weight @ legal.reshape(choices, -1)[:62]
    rest: NDArray[np.bool_] = np.zeros(code.shape, bool)
    for each, number in zip(*np.unique(code[code > 0], return_counts=True), strict=True):
        same = code == each
        chosen = legal[:, :, int(same.argmax())]
        if number * choices * beside < _SMALL or choices > 62:
            rest |= same
            continue
        kept = {name: column[same] for name, column in rows.items()}
        # what is legal is, for each choice of sequence parallelism, a set of shardings; equal sets
        # go together
        for allowed in dict.fromkeys(map(tuple, chosen.T.tolist())):
            if any(allowed):
                sequences = [
                    each
                    for each, its in zip(axes.sequence_parallel, chosen.T, strict=True)
                    if tuple(its) == allowed
                ]
                shardings = [each for each, its in zip(axes.sharding, allowed, strict=True) if its]
                yield Block(
                    kept,
                    axes.offload,
                    axes.precision,
                    tuple(shardings),
                    axes.recompute,
                    tuple(sequences),
                )
    if choices > 62:
        rest = np.asarray(legal.any(axis=(0, 1)))
    if rest.any():
        kept = {name: column[rest] for name, column in rows.items()}
        mask = legal[None, None, :, None, :, :][..., rest]
        yield Block(
            kept,
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


def _useless(c: dict[str, Any], axes: Axes) -> dict[str, Any]:
    """Legal plans that do the same as another one, left out unless the field was asked for."""
    found = {
        "sequence_parallel": (
            "nothing to part at tp 1",
            (c["sequence_parallel"] > 0) & (c["tp"] == 1),
        ),
        "zero": ("nothing to shard over at dp x cp 1", (c["zero"] > 0) & (c["dp"] * c["cp"] == 1)),
        "dp_replicate": (
            "nothing is sharded at zero 0",
            (c["dp_replicate"] > 0) & (c["zero"] == 0),
        ),
    }
    return {
        f"{name}: {message}": mask
        for name, (message, mask) in found.items()
        if name not in axes.given
    }
