"""A pipeline's operations and their dependencies, arranged for NumPy.

Does not depend on times. Built once per (schedule, pp, virtual stages, micro-batches).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from orchestrator.planner.schedules.orders import Kind, Order, check, device_of_stage, device_orders

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]

KINDS: tuple[Kind, ...] = ("F", "B", "I", "W", "FB")
_MAX_FORWARDS = 1_000_000  # forwards of a program: about 5 s to build, 0.5 GB
_ROW = {kind: row for row, kind in enumerate(KINDS)}


@dataclass(frozen=True, eq=False)
class Program:
    """Operation i runs `micro_batch[i]` on `device[i]`; `row[i]` is kind index x stages + stage.

    Kinds are those of `KINDS`. An operation starts when all of `waits_for[:, i]` have ended: the
    operation before it on its device, the input of its forward, the input of its backward (the
    number of operations stands for none); the last two plus the time of `hops[:, i]`, the index of
    the crossed boundary (`stages` if none). Operations of one level wait for earlier levels only.
    `backward_micro_batch[i]` is that of an `FB`, whose backward stage is stages - 1 - stage. `peak`
    is the largest number of forwards held per device, each from its start to the end of its weight
    gradient.
    """

    pp: int
    stages: int
    device: Ints
    row: Ints
    micro_batch: Ints
    backward_micro_batch: Ints
    waits_for: Ints
    hops: Ints
    levels: list[slice]
    peak: Ints


@lru_cache(maxsize=128)
def program(schedule: str, pp: int, virtual_stages: int, micro_batches: int) -> Program:
    """The program of a pipeline.

    Raises ValueError if it cannot run or has too many operations.
    """
    check(schedule, pp, virtual_stages, micro_batches)
    if pp * virtual_stages * micro_batches > _MAX_FORWARDS:
        raise ValueError(
            f"{schedule} with pp {pp}, virtual_stages {virtual_stages}, {micro_batches} "
            f"micro-batches is too long to simulate (over {_MAX_FORWARDS} forwards). Use fewer "
            "micro-batches or the closed form."
        )
    orders = device_orders(schedule, pp, virtual_stages, micro_batches)
    stages, none = pp * virtual_stages, sum(map(len, orders))
    placed = [device_of_stage(schedule, pp, stage) for stage in range(stages)]
    hop = [stage if placed[stage] != placed[stage + 1] else stages for stage in range(stages - 1)]
    forward: list[list[int]] = [[-1] * micro_batches for _ in range(stages)]
    backward: list[list[int]] = [[-1] * micro_batches for _ in range(stages)]
    level = [0] * none + [-1]
    table: list[tuple[int, ...]] = []  # device, row, micro-batches, waits, hops of each operation
    following, last = [0] * pp, [none] * pp
    waiting = set(range(pp))
    while waiting:
        before = len(table)
        for at in sorted(waiting):
            order = orders[at]
            while following[at] < len(order):
                kind, stage, micro_batch, b_stage, b_micro_batch = order[following[at]]
                if kind != "FB":
                    b_stage, b_micro_batch = stage, micro_batch
                for_forward = for_backward = none
                hop_forward = hop_backward = stages
                if kind in ("F", "FB") and stage:
                    for_forward, hop_forward = forward[stage - 1][micro_batch], hop[stage - 1]
                if kind in ("B", "I", "FB") and b_stage < stages - 1:
                    for_backward, hop_backward = backward[b_stage + 1][b_micro_batch], hop[b_stage]
                if for_forward < 0 or for_backward < 0:
                    break
                index = len(table)
                if kind in ("F", "FB"):
                    forward[stage][micro_batch] = index
                if kind in ("B", "I", "FB"):
                    backward[b_stage][b_micro_batch] = index
                level[index] = 1 + max(level[last[at]], level[for_forward], level[for_backward])
                row = _ROW[kind] * stages + stage
                table.append(
                    (
                        at,
                        row,
                        micro_batch,
                        b_micro_batch,
                        last[at],
                        for_forward,
                        for_backward,
                        hop_forward,
                        hop_backward,
                    )
                )
                last[at] = index
                following[at] += 1
            if following[at] == len(order):
                waiting.discard(at)
        if len(table) == before:
            raise RuntimeError(
                f"{schedule} with pp {pp}, {micro_batches} micro-batches deadlocks on devices "
                f"{waiting}"
            )
    return _by_level(pp, stages, np.asarray(table), np.asarray(level[:-1]), _peaks(orders))


def _by_level(pp: int, stages: int, table: Ints, level: Ints, peak: Ints) -> Program:
    by_level = np.argsort(level, kind="stable")
    place = np.empty(len(level) + 1, np.int64)
    place[by_level], place[-1] = np.arange(len(level)), len(level)
    table = np.ascontiguousarray(table[by_level].T)
    bounds = np.cumsum(np.bincount(level)).tolist()
    return Program(
        pp=pp,
        stages=stages,
        device=table[0],
        row=table[1],
        micro_batch=table[2],
        backward_micro_batch=table[3],
        waits_for=place[table[4:7]],
        hops=table[7:],
        levels=[slice(low, high) for low, high in zip([0, *bounds], bounds, strict=False)],
        peak=peak,
    )


def _peaks(orders: list[Order]) -> Ints:
    step = {"F": 1, "B": -1, "I": 0, "W": -1}
    peaks = []
    for order in orders:
        held = most = 0
        for operation in order:
            if operation.kind == "FB":
                most = max(most, held + 1)
            else:
                held += step[operation.kind]
                most = max(most, held)
        peaks.append(most)
    return np.asarray(peaks)


def duration_rows(forward: Floats, backward: Floats, weight: Floats, overlap: Floats) -> Floats:
    """Durations [5 * stages, cases] by `Program.row`.

    Times are [stages, cases], `overlap` the seconds that an `FB` saves [cases]. A full backward
    takes backward + weight. In an `FB` stage s overlaps with stage 2·pp-1-s; it takes at least as
    long as the longer of the two.
    """
    both = backward + weight
    paired = both[::-1]
    pairs = np.maximum(forward + paired - overlap, np.maximum(forward, paired))
    return np.concatenate([forward, both, backward, weight, pairs])


def end_times(run: Program, rows: Floats, hop: Floats) -> Floats:
    """End of each operation [operations + 1, cases] from time 0; the last row is time 0.

    `rows` [5 * stages, cases] as from `duration_rows`; `hop` [stages + 1, cases], row s the time
    between stages s and s + 1, its last row 0.
    """
    end = np.zeros((len(run.row) + 1, rows.shape[1]))
    own, forward, backward = run.waits_for
    forward_hop, backward_hop = run.hops
    durations = rows[run.row]
    for at in run.levels:
        arrived = np.maximum(
            end[forward[at]] + hop[forward_hop[at]], end[backward[at]] + hop[backward_hop[at]]
        )
        end[at] = np.maximum(arrived, end[own[at]]) + durations[at]
    return end
