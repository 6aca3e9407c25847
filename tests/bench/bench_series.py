"""Time to reduce a metric of a million points to at most 1500; planted spikes must remain.

Measures the selector and the JSON text, with the database file cached as on a viewed page.
"""

from __future__ import annotations

import statistics
import time

import numpy as np

from tests.bench.record import record
from tests.bench.stack import stack

COUNT = 1_000_000
SPIKES = 20
ROUNDS = 15


def main() -> None:
    with stack():
        measure()


def measure() -> None:
    from orchestrator.common import live
    from orchestrator.telemetry import selectors, services
    from tests import factories
    from workers.contracts.wire.points import PointBatch

    run = factories.external_run(factories.user("bench"))
    draw = np.random.default_rng(0)
    y = 2 + 3 * np.exp(-np.arange(COUNT) / 100_000) + draw.normal(size=COUNT) * 0.02
    spikes = draw.choice(COUNT, SPIKES, replace=False)
    y[spikes] += draw.choice([-1.5, 1.5], SPIKES)
    for start in range(0, COUNT, 10_000):
        steps = list(range(start + 1, start + 10_001))
        batch = PointBatch(
            run=str(run.pk),
            attempt=1,
            rank=0,
            seq=steps,
            step=steps,
            tokens=steps,
            time=[1.79e9 + s for s in steps],
            values={"loss": y[start : start + 10_000].tolist()},
        )
        services.points_store(run=run, attempt=1, batches=[batch])
    requests = {
        "whole": {},
        "a third of it": {"from_": 300_000, "to": 633_333},
        "by time": {"x": "time"},
    }
    for label, options in requests.items():
        milliseconds = []
        for _ in range(ROUNDS):
            started = time.perf_counter()
            answer = selectors.series(run=run, name="loss", points=1500, **options)  # type: ignore[arg-type]
            text = live.dumps(answer.to_dict())
            milliseconds.append((time.perf_counter() - started) * 1e3)
        assert len(answer.x) <= 1500
        what = f"series of 1M points, {label}, {len(answer.x)} points drawn"
        value = statistics.median(milliseconds)
        record(
            "series",
            what=what,
            value=value,
            unit="ms",
            figure="<= 60",
            worst=max(milliseconds),
            bytes=len(text),
        )
    full = selectors.series(run=run, name="loss", points=1500)
    remaining = len(set(full.x) & {int(step) + 1 for step in spikes})
    record(
        "series",
        what=f"planted spikes kept of {SPIKES}",
        value=remaining,
        unit="spikes",
        figure=f"== {SPIKES}",
    )


if __name__ == "__main__":
    main()
