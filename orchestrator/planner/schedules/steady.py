"""Long steps from short ones: in the steady state more micro-batches only add repetitions.

Extrapolates only observed repetitions, so that the result is exact or None.
"""

from __future__ import annotations

import numpy as np

from orchestrator.planner.schedules.program import Floats, Ints, Program

# per stage and micro-batch; an `FB` is half of two stages'
SPLIT_OPERATIONS = {"zb1p": 3, "zbv": 3, "dualpipev": 1}
_MANY = 60_000  # operations: 0.25 s to build and run
_SEEN = 3  # consecutive periods that must be equal; no operation waits for an earlier one


def shortened(schedule: str, pp: int, virtual_stages: int, micro_batches: int) -> tuple[int, int]:
    """(Micro-batches to simulate, micro-batches per period).

    The step itself if it is short or never repeats.
    """
    operations = pp * virtual_stages * micro_batches * SPLIT_OPERATIONS.get(schedule, 2)
    period = (
        micro_batches // max(1, micro_batches // pp)
        if schedule in ("interleaved_1f1b", "zb1p")
        else pp
    )
    enough = (_SEEN + 6) * period
    if schedule == "gpipe" or operations < _MANY or micro_batches <= enough:
        return micro_batches, period
    return enough + (micro_batches - enough) % period, period


def repetition(
    schedule: str, virtual_stages: int, run: Program, ends: Floats, period: int
) -> tuple[float, Ints] | None:
    """Seconds per additional period of micro-batches, and the operations that it repeats.

    None if not certain. Each device's order has a stretch in which the same operations return
    `period` micro-batches later. If all of them, on all devices, also ended equally later over the
    last three periods of that stretch, one more period shifts everything after it by the same time.
    """
    length = virtual_stages * period * SPLIT_OPERATIONS.get(schedule, 2)
    blocks, later = [], []
    for device in range(run.pp):
        own = np.flatnonzero(run.device == device)
        then, now = own[:-length], own[length:]
        same = run.row[then] == run.row[now]
        for micro_batch in (run.micro_batch, run.backward_micro_batch):
            same &= micro_batch[then] + period == micro_batch[now]
        edges = np.flatnonzero(np.diff(np.concatenate([[False], same, [False]])))
        longest = int(np.diff(edges)[::2].argmax()) if edges.size else 0
        first, last = edges[2 * longest : 2 * longest + 2].tolist() or (0, 0)
        if last - first < _SEEN * length:
            return None
        seen = slice(last - _SEEN * length, last)
        later.append(ends[now[seen]] - ends[then[seen]])
        blocks.append(now[last - length : last])
    grown = np.concatenate(later)
    if np.ptp(grown) > 1e-9 * grown.max():
        return None
    return float(grown.mean()), np.concatenate(blocks)
