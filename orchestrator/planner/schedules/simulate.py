"""An event simulator of pipeline schedules: start and end of every operation of every device.

Transfers take time but do not occupy a device. Does not depend on the origin of the times.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

import numpy as np

from orchestrator.planner.schedules.orders import Kind, check
from orchestrator.planner.schedules.program import (
    KINDS,
    Floats,
    Program,
    duration_rows,
    end_times,
    program,
)
from orchestrator.planner.schedules.steady import repetition, shortened

Times = float | Sequence[float] | Floats


class Event(NamedTuple):
    """An operation with start and end.

    The last two fields name the backward half of an `FB`, else they are -1.
    """

    device: int
    stage: int
    micro_batch: int
    kind: Kind
    start_s: float
    end_s: float
    backward_stage: int
    backward_micro_batch: int


@dataclass(frozen=True, eq=False)
class Simulation:
    """The simulation of one step.

    `busy_s` [pp] is each device's time in operations, `bubble_fraction` the idle share of all
    devices' time, 1 - sum(busy) / (pp * makespan). `in_flight` [pp] is the largest number of micro-
    batches whose activations a device holds, each from its forward to the end of its weight
    gradient, in full devices: a chunk counts 1 / virtual_stages.

    The end of a step with very many operations is computed exactly from a shorter one (see
    `steady`), and only the first `listed` micro-batches have events. A pipedream run never flushes:
    its makespan is the time of `micro_batches` in the steady state, so its bubble is 0 if stages
    are balanced and hops are free; its events are those of the start of the run.
    """

    schedule: str
    pp: int
    virtual_stages: int
    micro_batches: int
    listed: int
    makespan_s: float
    busy_s: Floats
    in_flight: Floats
    run: Program
    ends_s: Floats
    lasts_s: Floats

    @property
    def bubble_fraction(self) -> float:
        """Idle share of all devices' time; 0 if nothing takes time."""
        total = self.pp * self.makespan_s
        return 1.0 - float(self.busy_s.sum()) / total if total else 0.0

    @cached_property
    def events(self) -> list[Event]:
        """The operations of the first `listed` micro-batches, by device, then time."""
        run, events = self.run, []
        order = np.lexsort((self.ends_s, run.device))
        for i in order[run.micro_batch[order] < self.listed].tolist():
            kind, stage = divmod(int(run.row[i]), run.stages)
            pair = KINDS[kind] == "FB"
            events.append(
                Event(
                    device=int(run.device[i]),
                    stage=stage,
                    micro_batch=int(run.micro_batch[i]),
                    kind=KINDS[kind],
                    start_s=float(self.ends_s[i] - self.lasts_s[i]),
                    end_s=float(self.ends_s[i]),
                    backward_stage=run.stages - 1 - stage if pair else -1,
                    backward_micro_batch=int(run.backward_micro_batch[i]) if pair else -1,
                )
            )
        return events


def simulate(
    schedule: str,
    pp: int,
    micro_batches: int,
    *,
    forward_s: Times,
    backward_s: Times,
    weight_s: Times,
    virtual_stages: int = 1,
    hop_s: Times = 0.0,
    overlap_s: float = 0.0,
) -> Simulation:
    """Runs a schedule's order; an operation starts when its device is free and its input exists.

    forward_s, backward_s (input gradient), weight_s (weight gradient): seconds per stage and micro-
    batch, one for all or one for each of the pp * virtual_stages stages; recomputation belongs to
    the backward. Schedules that do not split the backward run backward + weight as one. hop_s:
    transfer between adjacent stages, one for all or one for each of the stages - 1 boundaries; 0 if
    both stages are on one device. overlap_s: what dualpipev saves when a forward overlaps with a
    backward, at most the shorter of them. Raises ValueError for a pipeline that cannot run or for
    invalid times.
    """
    check(schedule, pp, virtual_stages, micro_batches)
    short, period = shortened(schedule, pp, virtual_stages, micro_batches)
    times = (forward_s, backward_s, weight_s, hop_s, overlap_s)
    if schedule == "pipedream":
        return _endless(pp, micro_batches, min(short, micro_batches), *times)
    if short < micro_batches:
        part = _run(schedule, pp, virtual_stages, short, *times)
        if repeated := repetition(schedule, virtual_stages, part.run, part.ends_s, period):
            more, again = (micro_batches - short) // period, repeated[1]
            busy = np.bincount(part.run.device[again], part.lasts_s[again], pp)
            return replace(
                part,
                micro_batches=micro_batches,
                listed=short - 3 * period,
                makespan_s=part.makespan_s + more * repeated[0],
                busy_s=part.busy_s + more * busy,
            )
    return _run(schedule, pp, virtual_stages, micro_batches, *times)


def _run(
    schedule: str,
    pp: int,
    v: int,
    m: int,
    forward_s: Times,
    backward_s: Times,
    weight_s: Times,
    hop_s: Times,
    overlap_s: float,
) -> Simulation:
    run = program(schedule, pp, v, m)
    rows = duration_rows(
        _column("forward_s", forward_s, run.stages),
        _column("backward_s", backward_s, run.stages),
        _column("weight_s", weight_s, run.stages),
        _column("overlap_s", overlap_s, 1)[0],
    )
    hop = np.concatenate([_column("hop_s", hop_s, run.stages - 1), np.zeros((2, 1))])
    ends = end_times(run, rows, hop)[:-1, 0]
    lasts = rows[run.row, 0]
    return Simulation(
        schedule=schedule,
        pp=pp,
        virtual_stages=v,
        micro_batches=m,
        listed=m,
        makespan_s=float(ends.max()),
        busy_s=np.bincount(run.device, lasts, pp).astype(np.float64),
        in_flight=run.peak / v,
        run=run,
        ends_s=ends,
        lasts_s=lasts,
    )


def _endless(
    pp: int,
    m: int,
    short: int,
    forward_s: Times,
    backward_s: Times,
    weight_s: Times,
    hop_s: Times,
    overlap_s: float,
) -> Simulation:
    """A pipedream run: events of its start, time of the steady state."""
    start = _run("pipedream", pp, 1, short + pp, forward_s, backward_s, weight_s, hop_s, overlap_s)
    work = sum(_column("", times, pp)[:, 0] for times in (forward_s, backward_s, weight_s))
    pace = steady_period_s(np.asarray(work), _column("", hop_s, pp - 1)[:, 0])
    return replace(
        start, micro_batches=m, listed=short, makespan_s=m * pace, busy_s=m * np.asarray(work)
    )


def steady_period_s(work_s: Floats, hop_s: Floats) -> float:
    """Seconds per micro-batch of an endless 1F1B run.

    From each stage's work [p] and the hops between stages [p - 1]. Stages i..j exchange j - i + 1
    micro-batches, each stage working on each and each hop counted twice; the slowest such cycle
    binds (the largest cycle mean of the order's dependencies).
    """
    work_sum = np.concatenate([[0.0], np.cumsum(work_s)])
    hop_sum = np.concatenate([[0.0], np.cumsum(2 * hop_s)])
    low, high = np.triu_indices(len(work_s))
    return float(
        (
            (work_sum[high + 1] - work_sum[low] + hop_sum[high] - hop_sum[low]) / (high - low + 1)
        ).max()
    )


def _column(name: str, value: Times, length: int) -> Floats:
    """`value` as [length, 1].

    Raises ValueError unless it is one or `length` finite numbers, none negative.
    """
    array = np.asarray(value, dtype=np.float64)
    if array.ndim > 1 or (array.ndim == 1 and array.size != length):
        raise ValueError(f"{name} has shape {array.shape}, must be one number or {length}")
    if not np.isfinite(array).all() or (array < 0).any():
        raise ValueError(f"{name} must be finite and not negative, got {value}")
    return np.broadcast_to(array.reshape(-1, 1), (length, 1))
