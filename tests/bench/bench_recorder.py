"""Cost of recording in the training loop: 30 values per step, steps of 50 ms on a busy core."""

from __future__ import annotations

import statistics
import tempfile
import time
from pathlib import Path

from tests.bench.record import record
from workers.metrics.recorder import Recorder

BLOCKS = 10
STEPS = 20
STEP_S = 0.05
VALUES = {f"metric/{number}": 1.0 / (number + 1) for number in range(30)}


def main() -> None:
    alone: list[float] = []
    recorded: list[float] = []
    with tempfile.TemporaryDirectory() as folder:
        recorder = Recorder(Path(folder), run="bench", attempt=1, rank=0)
        # alternate, so that a drift of the machine does not look like a cost
        for block in range(BLOCKS):
            alone += steps(None, block)
            recorded += steps(recorder, block)
        waited = recorder.cost_s / len(recorded)
        recorder.close()
    share = waited / STEP_S
    record(
        "recorder",
        what="waiting in the loop",
        value=share,
        unit="of a step",
        figure="<= 0.01",
        us=waited * 1e6,
    )
    slower = statistics.median(recorded) / statistics.median(alone) - 1
    record(
        "recorder",
        what="slower steps, all in all",
        value=slower,
        unit="of a step",
        figure="<= 0.01",
    )


def steps(recorder: Recorder | None, block: int) -> list[float]:
    """Seconds of each of STEPS steps.

    A step is a fixed number of products, so that another thread's work is visible.
    """
    count = iterations_per_step()
    seconds = []
    for step in range(block * STEPS + 1, (block + 1) * STEPS + 1):
        started = time.perf_counter()
        spin(count)
        if recorder is not None:
            recorder.point(step=step, tokens=step * 1000, values=VALUES)
        seconds.append(time.perf_counter() - started)
    return seconds


def spin(count: int) -> float:
    total = 0.0
    for number in range(count):
        total += number * 0.5
    return total


_count: list[int] = []


def iterations_per_step() -> int:
    """Iterations of `spin` that take STEP_S; measured once, so that both loops do equal work."""
    if not _count:
        started = time.perf_counter()
        spin(1_000_000)
        _count.append(int(1_000_000 * STEP_S / (time.perf_counter() - started)))
    return _count[0]


if __name__ == "__main__":
    main()
