"""Estimated starts compared with the starts of the simulation, at the time of submission.

The trace is synthetic, after Philly's statistics, on 20 nodes of 8 devices at an offered load of
0.9. When a run is submitted and must wait, the estimator gets what the scheduler knows then: queue,
holders with their ends, usage and recent runs. A sample of them counts. Ends come from predicted
durations only (within 20% of the whole duration), and, in a second row, from measured progress, as
`queue.start_estimates.ends` has them (within 20% of what is left). An estimate draws samples until
the job's time for them is over, counted in CPU time, so that other load does not reduce them.
"""

from __future__ import annotations

import os
import random
import statistics
import time
from typing import Any

from tests.bench.record import record

# remaining time that measured progress predicts: its error here, and the interval that is assumed
PROGRESS_ERROR, EARLY, LATE = 0.2, 0.8, 1.25
RUNS, NODES, DEVICES = 2000, 20, 8
SEEDS = (1, 2, 3)
LEAST_WAIT_S = 60.0


def main() -> None:
    from orchestrator.scheduling.simulation.estimates import BUDGET_S

    each = int(os.environ.get("ESTIMATES", "40"))
    for progress in (False, True):
        errors: list[float] = []
        inside: list[bool] = []
        samples: list[int] = []
        by_seed = {}
        for seed in SEEDS:
            own = errors_of(seed, each, progress=progress)
            errors += [error for error, _, _ in own]
            inside += [held for _, held, _ in own]
            samples += [drawn for _, _, drawn in own]
            by_seed[seed] = round(100 * statistics.median(error for error, _, _ in own), 1)
        ends = "measured progress" if progress else "predicted durations only"
        record(
            "estimates",
            what="median relative error of estimated waiting at submission, runs that wait > 60 s, "
            f"ends from {ends}",
            value=100 * statistics.median(errors),
            unit="%",
            figure="<= 20",
            runs=len(errors),
            samples={"median": statistics.median(samples), "least": min(samples)},
            budget_cpu_s=BUDGET_S,
            by_seed=by_seed,
            within_interval=round(sum(inside) / len(inside), 3),
            quartiles=[round(100 * part, 1) for part in statistics.quantiles(errors, n=4)],
            trace=f"philly:{RUNS}:1-3",
            nodes=NODES,
        )


def errors_of(seed: int, each: int, *, progress: bool) -> list[tuple[float, bool, int]]:
    """Relative error, whether the interval holds the start, and samples of a trace's estimates."""
    from orchestrator.scheduling.ordering.orders import ORDERS
    from orchestrator.scheduling.simulation.compare import synthetic_trace
    from orchestrator.scheduling.simulation.estimates import (
        BUDGET_S,
        Policy,
        estimate_starts,
    )
    from orchestrator.scheduling.simulation.simulate import State, simulate

    trace = synthetic_trace(f"philly:{RUNS}:{seed}", devices=NODES * DEVICES)
    assert trace is not None
    rng, noise, estimated = random.Random(seed), random.Random(-seed), dict[int, Any]()

    def ends_of(state: State) -> dict[int, tuple[float, float]]:
        if not progress:
            return state.ends
        ends = {}
        for run, (low, high) in state.ends.items():
            true = state.starts[run] + float(trace.duration_s[run])
            left = (true - state.now) * noise.uniform(1 - PROGRESS_ERROR, 1 + PROGRESS_ERROR)
            ends[run] = (
                max(low, min(high, state.now + EARLY * left)),
                min(high, state.now + LATE * left),
            )
        return ends

    def observe(state: State) -> None:
        new = [run for run in state.waiting if run.queued_at == state.now > 0]
        if not new or rng.random() > 0.2 or len(estimated) >= each:
            return
        policy = Policy({}, {}, {}, state.usage, order=ORDERS["orrery"])
        starts = estimate_starts(
            state.waiting,
            state.nodes,
            state.now,
            policy=policy,
            ends=ends_of(state),
            recent=state.recent,
            budget_s=BUDGET_S,
            clock=time.process_time,
        )
        for run in new:
            if run.run in starts:
                estimated[run.run] = starts[run.run]

    outcome = simulate(
        trace, ORDERS["orrery"], nodes=NODES, devices_per_node=DEVICES, observe=observe
    )
    result = []
    for run, estimate in estimated.items():
        submit, start = float(trace.submit_s[run]), float(outcome.start_s[run])
        if start - submit > LEAST_WAIT_S:
            error = abs(estimate.start - start) / (start - submit)
            held = estimate.low <= start <= estimate.high
            result.append((error, held, estimate.samples))
    return result


if __name__ == "__main__":
    main()
