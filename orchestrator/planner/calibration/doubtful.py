"""Finds measured runs that cannot be right or that contradict others.

A run beyond the device's peak is left out. Runs of one plan that differ count less, and the result
names them: nothing is averaged silently. Does not fit anything.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from orchestrator.planner.calibration.measurements import Pair, step_times
from orchestrator.planner.model.inputs import table_of
from orchestrator.planner.model.kriging import NO_CORRECTION
from orchestrator.planner.model.parameters import defaults

# repeated runs of one plan differ by 1 to 5% on a healthy cluster (BLOOM's log, vTrain's table)
_REPEATS = 0.15
_FASTEST = 1.0  # share of the datasheet's peak that executed operations may reach


@dataclass(frozen=True)
class Doubts:
    """`scales` of the residuals `(n,)`, 1 without doubt and 0 if impossible; messages by row."""

    scales: np.ndarray
    messages: dict[int, str]

    def to_dicts(self, pairs: Sequence[Pair]) -> list[dict[str, Any]]:
        """The messages with row numbers from 1 and ids."""
        return [
            {"line": row + 1, "id": pairs[row][0].id, "message": message}
            for row, message in sorted(self.messages.items())
        ]


def find_doubts(pairs: Sequence[Pair]) -> Doubts:
    """What is impossible or contradictory among the runs."""
    scales, messages = np.ones(len(pairs)), dict[int, str]()
    if not pairs:
        return Doubts(scales, messages)
    requests = [request for request, _ in pairs]
    start = defaults(requests[0].framework.name, requests[0].entry)
    table = table_of(
        requests, {**NO_CORRECTION, **{name: np.asarray(value) for name, value in start.items()}}
    )
    seconds = step_times(pairs, table)
    work = table.column("executed_flops") / table.column("devices")
    share = work / seconds / table.column("peak_flops")
    # half of the attention operations of a causal model need not be executed
    share = share * (
        1
        - table.column("attention_flops_per_token")
        / 2
        / table.column("model_flops_per_token")
        * (table.column("causal_flops") == 0)
    )
    for row in np.flatnonzero((share > _FASTEST) & (table.column("is_cpu") == 0)):
        scales[row] = 0.0
        messages[int(row)] = (
            f"impossible: {share[row]:.0%} of the peak of {requests[row].entry.name}; the run is "
            "left out. Check the step time, the number of devices and the batch"
        )
    groups: dict[Hashable, list[int]] = {}
    for row in np.flatnonzero(np.isfinite(seconds) & (scales > 0)):
        groups.setdefault(_key(pairs[row]), []).append(int(row))
    for rows in groups.values():
        times = seconds[rows]
        if len(rows) > 1 and times.max() / times.min() > 1 + _REPEATS:
            middle = float(np.median(np.log(times)))
            for row in rows:
                away = abs(float(np.log(seconds[row])) - middle) + _REPEATS / 2
                scales[row] = min(1.0, _REPEATS / 3 / away)
                messages[row] = (
                    f"contradictory: {len(rows)} runs of this plan took {times.min():.4g} to "
                    f"{times.max():.4g} s per step; each counts less"
                )
    return Doubts(scales, messages)


def _key(pair: Pair) -> Hashable:
    """Runs with equal keys should take the same time."""
    request = pair[0]
    return (
        request.model.model_dump_json(),
        request.plan.model_dump_json(),
        request.cluster.model_dump_json(),
        request.seq_len,
        repr(request.framework),
        repr(request.train),
    )
