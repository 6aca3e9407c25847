"""Draws synthetic traces that follow published statistics; equal arguments give equal traces.

Durations follow the published quantiles, interpolated in log(quantile); the share of each size in
runs and in device time holds on average, so larger runs are longer. Does not depend on policies.
"""

from __future__ import annotations

import functools
import math

import numpy as np
from numpy.typing import NDArray

from orchestrator.scheduling.simulation.trace_statistics import (
    ARRIVALS,
    SHORTEST_S,
    STATISTICS,
    TEAM_EXPONENT,
    USER_EXPONENT,
    TraceStatistics,
)
from orchestrator.scheduling.simulation.traces import Trace

OFFERED_LOAD = 0.9  # device-seconds of all runs over those of the devices
_BINS = 400
_ROUNDS = 200
_Array = NDArray[np.float64]


def draw(kind: str, *, runs: int, seed: int, devices: int) -> Trace:
    """A trace of `kind` ("philly" or "helios") that offers a load of 0.9 to this many devices.

    It begins with the runs that such a cluster has in progress, with the rest of their durations,
    because filling an empty cluster takes longer than most traces; they are at most a fifth of
    all. Runs that would need more devices than there are need the largest power of two of them.
    """
    statistics, rng = STATISTICS[kind], np.random.default_rng(seed)
    largest = 2 ** int(math.log2(devices))
    sizes = np.minimum(np.array(statistics.devices), largest)
    chance, seconds = _joint(kind)
    work = float((chance * seconds).sum(axis=1) @ sizes)  # mean device-seconds of a run
    rate = OFFERED_LOAD * devices / work
    started = min(runs // 5, round(rate * float((chance * seconds).sum())))
    longer = chance * seconds / (chance * seconds).sum()
    classes, durations = _draw_runs(rng, statistics, chance, runs - started)
    in_progress = _draw_runs(rng, statistics, longer, started)
    classes = np.concatenate([in_progress[0], classes])
    durations = np.concatenate([in_progress[1] * rng.random(started), durations])
    durations = np.maximum(1.0, np.round(durations))
    length = float((durations[started:] * sizes[classes[started:]]).sum())
    submitted = _arrivals(rng, runs - started, length / (OFFERED_LOAD * devices))
    users = rng.choice(statistics.users, size=runs, p=_power_law(statistics.users, USER_EXPONENT))
    teams = rng.choice(
        statistics.teams, size=statistics.users, p=_power_law(statistics.teams, TEAM_EXPONENT)
    )
    return Trace(
        name=f"{kind}:{runs}:{seed}",
        seed=seed,
        submit_s=np.concatenate([np.zeros(started), submitted]),
        devices=sizes[classes].astype(np.int64),
        duration_s=durations,
        priority=np.zeros(runs, dtype=np.int64),
        user=[f"user-{number}" for number in users],
        team=[f"team-{teams[number]}" for number in users],
    )


def _draw_runs(
    rng: np.random.Generator, statistics: TraceStatistics, chance: _Array, runs: int
) -> tuple[NDArray[np.int64], _Array]:
    """Size classes and durations of this many runs."""
    columns = chance.sum(axis=0)
    bins = rng.choice(len(columns), size=runs, p=columns)
    low, high = _edges()[bins], _edges()[bins + 1]
    points, logs = _curve(statistics)
    durations = np.exp(np.interp(low + (high - low) * rng.random(runs), points, logs))
    by_bin = np.cumsum(chance / columns, axis=0)
    classes = (rng.random(runs)[None, :] > by_bin[:, bins]).sum(axis=0)
    return np.minimum(classes, len(statistics.devices) - 1), durations


def _arrivals(rng: np.random.Generator, runs: int, length: float) -> _Array:
    """Sorted times in seconds of a Poisson process whose rate follows the hour of the day."""
    hours = max(1, math.ceil(length / 3600))
    rates = np.array([ARRIVALS[hour % 24] for hour in range(hours)])
    rates[-1] *= length / 3600 - (hours - 1) if length > 3600 * (hours - 1) else 1.0
    passed = np.concatenate([[0.0], np.cumsum(rates)])
    ends = np.minimum(np.arange(hours + 1) * 3600.0, length)
    times = np.interp(np.sort(rng.random(runs)) * passed[-1], passed, ends)
    since_first: _Array = np.round(times - times[0], 3)
    return since_first


def _power_law(count: int, exponent: float) -> _Array:
    weights = np.arange(1, count + 1, dtype=np.float64) ** -exponent
    shares: _Array = weights / weights.sum()
    return shares


@functools.cache
def _edges() -> _Array:
    """Probabilities that bound the bins, finer towards the long runs."""
    edges: _Array = 1.0 - (1.0 - np.linspace(0.0, 1.0, _BINS + 1)) ** 3
    return edges


def _curve(statistics: TraceStatistics) -> tuple[_Array, _Array]:
    """Probabilities and log(duration); the longest duration is such that the mean holds."""
    points = np.array([0.0, *statistics.quantiles, 1.0])
    known = [SHORTEST_S, *statistics.quantiles.values()]
    low, high = known[-1], known[-1] * 100.0
    for _ in range(60):
        longest = math.sqrt(low * high)
        logs = np.log(np.array([*known, longest]))
        if _mean(points, logs) < statistics.mean_s:
            low = longest
        else:
            high = longest
    return points, np.log(np.array([*known, math.sqrt(low * high)]))


def _mean(points: _Array, logs: _Array) -> float:
    """Mean of exp(a function that is linear between the points)."""
    widths, values = np.diff(points), np.exp(logs)
    return float((widths * np.diff(values) / np.diff(logs)).sum())


@functools.cache
def _joint(kind: str) -> tuple[_Array, _Array]:
    """Probability of each size and duration bin, and the mean duration of each bin.

    Of a table with the published margins (iterative proportional fitting), each size's preference
    for long runs is changed until its share of the device time is the published one.
    """
    statistics = STATISTICS[kind]
    edges = _edges()
    points, logs = _curve(statistics)
    middles = np.exp(np.interp((edges[:-1] + edges[1:]) / 2, points, logs))
    columns = np.diff(edges)
    rows = np.array(statistics.runs) / sum(statistics.runs)
    wanted = np.array(statistics.device_time) / sum(statistics.device_time)
    wanted = wanted / np.array(statistics.devices)
    wanted = wanted / wanted.sum()  # share of the run time of all runs
    tilt, scaled = np.zeros(len(rows)), np.log(middles / statistics.mean_s)
    for _ in range(_ROUNDS):
        table = rows[:, None] * columns[None, :] * np.exp(tilt[:, None] * scaled[None, :])
        for _ in range(20):
            table *= (columns / table.sum(axis=0))[None, :]
            table *= (rows / table.sum(axis=1))[:, None]
        table *= (columns / table.sum(axis=0))[None, :]
        got = table @ middles
        tilt += 0.3 * np.log(wanted / (got / got.sum()))
        tilt -= tilt.mean()
    return table / table.sum(), middles
