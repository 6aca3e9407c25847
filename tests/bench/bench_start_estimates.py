"""Estimated starts compared with the starts of the simulation, at the time of submission.

The trace is synthetic, after Philly's statistics, on 20 nodes of 8 devices at an offered load of
0.9. When a run is submitted and must wait, the estimator gets what the scheduler knows then: queue,
holders with their predicted ends (within 20%), usage and recent runs. A sample of them counts.
"""

from __future__ import annotations

import os
import random
import statistics
from typing import Any

from tests.bench.record import record

RUNS, NODES, DEVICES = 2000, 20, 8
SEEDS = (1, 2, 3)
LEAST_WAIT_S = 60.0


def main() -> None:
    from orchestrator.scheduling.ordering.orders import ORDERS
    from orchestrator.scheduling.simulation.compare import synthetic_trace
    from orchestrator.scheduling.simulation.estimates import Policy, estimate_starts
    from orchestrator.scheduling.simulation.simulate import State, simulate

    each = int(os.environ.get("ESTIMATES", "40"))
    errors: list[float] = []
    inside = 0
    for seed in SEEDS:
        trace = synthetic_trace(f"philly:{RUNS}:{seed}", devices=NODES * DEVICES)
        assert trace is not None
        rng, estimated = random.Random(seed), dict[int, Any]()
        submitted = [0]

        def observe(state: State) -> None:
            new = [run for run in state.waiting if run.queued_at == state.now > 0]
            if not new or rng.random() > 0.2 or len(estimated) >= each:  # noqa: B023
                return
            policy = Policy({}, {}, {}, state.usage, order=ORDERS["orrery"])
            starts = estimate_starts(
                state.waiting,
                state.nodes,
                state.now,
                policy=policy,
                ends=state.ends,
                recent=state.recent,
            )
            for run in new:
                if run.run in starts:
                    estimated[run.run] = starts[run.run]  # noqa: B023
            submitted[0] += len(new)  # noqa: B023

        outcome = simulate(
            trace, ORDERS["orrery"], nodes=NODES, devices_per_node=DEVICES, observe=observe
        )
        for run, estimate in estimated.items():
            submit, start = float(trace.submit_s[run]), float(outcome.start_s[run])
            if start - submit > LEAST_WAIT_S:
                errors.append(abs(estimate.start - start) / (start - submit))
                inside += estimate.low <= start <= estimate.high
    record(
        "estimates",
        what="median relative error of estimated waiting at submission, runs that wait > 60 s",
        value=100 * statistics.median(errors),
        unit="%",
        figure="<= 20",
        runs=len(errors),
        within_interval=round(inside / len(errors), 3),
        quartiles=[round(100 * part, 1) for part in statistics.quantiles(errors, n=4)],
        trace=f"philly:{RUNS}:1-3",
        nodes=NODES,
    )


if __name__ == "__main__":
    main()
