"""What a policy achieved on a trace: waiting, completion, utilization, fairness. Pure."""

from __future__ import annotations

from typing import Final

import numpy as np
from numpy.typing import NDArray

from orchestrator.scheduling.simulation.simulate import Outcome
from orchestrator.scheduling.simulation.traces import Trace

STARVED_S: Final = 24 * 3600.0
STARVED_TIMES: Final = 10.0  # times the mean waiting time of `fifo`

_Array = NDArray[np.float64]


def waits(trace: Trace, outcome: Outcome) -> _Array:
    """Waiting time of each run in seconds."""
    return outcome.start_s - trace.submit_s


def measure(trace: Trace, outcome: Outcome, *, devices: int) -> dict[str, float | int]:
    """The figures of one policy except `starved`; utilization until the last submission.

    With elastic runs also `lost_device_h`, the device-hours of restarts for another size.
    """
    waited, window = waits(trace, outcome), float(trace.submit_s[-1])
    used = _used(trace, outcome, window)
    available = devices * window
    changed = {} if outcome.changes is None else {"lost_device_h": outcome.lost_device_s / 3600}
    return {
        "mean_wait_s": float(waited.mean()),
        "p95_wait_s": float(np.percentile(waited, 95)),
        "mean_completion_s": float((outcome.end_s - trace.submit_s).mean()),
        "utilization": float(used.sum()) / available if available > 0 else 0.0,
        "fragmentation": outcome.blocked_idle_s / available if available > 0 else 0.0,
        "fairness": _fairness(trace, used, available),
        **changed,
    }


def starved(trace: Trace, outcome: Outcome, *, fifo_mean_wait_s: float) -> int:
    """Runs that wait longer than a day and longer than ten times fifo's mean waiting time."""
    limit = max(STARVED_S, STARVED_TIMES * fifo_mean_wait_s)
    return int((waits(trace, outcome) > limit).sum())


def may_starve(trace: Trace, outcome: Outcome) -> bool:
    """Whether any run waits longer than a day, so that fifo's mean waiting time matters."""
    return bool((waits(trace, outcome) > STARVED_S).any())


def utilization_over_time(
    trace: Trace, outcome: Outcome, *, devices: int, bins: int = 120
) -> tuple[_Array, _Array]:
    """Bin ends in seconds and the utilization in each, until the last submission."""
    window = float(trace.submit_s[-1])
    if window <= 0:
        return np.array([]), np.array([])
    edges = np.linspace(0.0, window, bins + 1)
    # devices in use integrated up to each edge
    times, _, devices_changed = _changes(trace, outcome)
    by_time = np.argsort(times)
    at, count = times[by_time], devices_changed[by_time]
    weight = np.concatenate([[0.0], np.cumsum(count)])
    moment = np.concatenate([[0.0], np.cumsum(count * at)])
    place = np.searchsorted(at, edges, side="right")
    passed = weight[place] * edges - moment[place]
    return edges[1:], np.diff(passed) / (devices * np.diff(edges))


def _used(trace: Trace, outcome: Outcome, window: float) -> _Array:
    """Device-seconds of each run until the last submission."""
    times, runs, changed = _changes(trace, outcome)
    # a run that gets d devices at t and gives them back at u has used d x u - d x t
    changes = -changed * np.minimum(times, window)
    return np.bincount(runs, weights=changes, minlength=len(trace)).astype(np.float64)


def _changes(trace: Trace, outcome: Outcome) -> tuple[_Array, NDArray[np.int64], _Array]:
    """Time, run and devices that it gets or, below 0, gives back."""
    if outcome.changes is not None:
        times, runs, devices = zip(*outcome.changes, strict=True)
        return np.array(times), np.array(runs), np.array(devices, np.float64)
    number = np.arange(len(trace))
    held = trace.devices.astype(np.float64)
    return (
        np.concatenate([outcome.start_s, outcome.end_s]),
        np.concatenate([number, number]),
        np.concatenate([held, -held]),
    )


def _fairness(trace: Trace, used: _Array, available: float) -> float:
    """Jain's index over teams of received over entitled device-seconds; 1 is equal.

    Jain, Chiu, Hawe, "A Quantitative Measure of Fairness", DEC TR-301, 1984. A team is entitled to
    its max-min fair share: an equal part of the available device time, or what it submitted in time
    to be served if that is less; the others share the rest.
    """
    names, teams = np.unique(np.array(trace.team), return_inverse=True)
    received = np.bincount(teams, weights=used, minlength=len(names))
    window = float(trace.submit_s[-1])
    wanted_s = np.minimum(trace.duration_s, window - trace.submit_s) * trace.devices
    wanted = np.bincount(teams, weights=wanted_s, minlength=len(names)).astype(np.float64)
    entitled = max_min_share(wanted, available)
    some = entitled > 0
    if not some.any():
        return 1.0
    ratio = received[some] / entitled[some]
    squares = float((ratio**2).sum())
    return float(ratio.sum()) ** 2 / (len(ratio) * squares) if squares > 0 else 1.0


def max_min_share(wanted: _Array, available: float) -> _Array:
    """Divide `available`: no share exceeds what is wanted, and the smallest share is largest."""
    shares = np.zeros_like(wanted)
    left = available
    for rank, place in enumerate(np.argsort(wanted)):
        shares[place] = min(wanted[place], left / (len(wanted) - rank))
        left -= shares[place]
    return shares
