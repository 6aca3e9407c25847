"""The simulator: its speed on one core, and waiting, utilization and starvation of the policies.

Traces are synthetic, after Philly's statistics, at an offered load of 0.9.
"""

from __future__ import annotations

import os
import time

from tests.bench.record import record

SEEDS = (1, 2, 3)


def main() -> None:
    from orchestrator.scheduling.ordering.orders import ORDERS
    from orchestrator.scheduling.simulation.compare import Setup, compare, synthetic_trace

    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})  # one core
    policies = tuple(name for name, order in ORDERS.items() if not order.elastic)
    for runs, nodes in ((20_000, 200), (2000, 20)):
        for seed in SEEDS:
            setup = Setup(nodes, 8, policies)
            trace = synthetic_trace(f"philly:{runs}:{seed}", devices=setup.devices)
            assert trace is not None
            figures = compare(trace, setup)["policies"]
            more = {"trace": trace.name, "nodes": nodes, "policies": figures}
            scored = nodes == 200
            ratio = figures["orrery"]["mean_wait_s"] / figures["fifo"]["mean_wait_s"]
            what = f"mean waiting, orrery over fifo, {nodes} nodes, seed {seed}"
            figure = "<= 0.5" if scored else ""
            record("simulate", what=what, value=ratio, unit="", figure=figure, **more)
            points = figures["orrery"]["utilization"] - figures["fifo"]["utilization"]
            what = f"utilization, orrery minus fifo, {nodes} nodes, seed {seed}"
            figure = ">= 5" if scored else ""
            record("simulate", what=what, value=100 * points, unit="points", figure=figure)
            what = f"starved, orrery, {nodes} nodes, seed {seed}"
            count = figures["orrery"]["starved"]
            record("simulate", what=what, value=count, unit="", figure="<= 0")
    measure_speed()


def measure_speed() -> None:
    """CPU time of the simulator on one core: other programs may use the core too."""
    from orchestrator.scheduling.simulation.compare import Setup, compare, synthetic_trace

    setup = Setup(10_000, 8, ("orrery",))
    started, cpu = time.perf_counter(), time.process_time()
    trace = synthetic_trace("philly:100000:1", devices=setup.devices)
    assert trace is not None
    compare(trace, setup)
    took, cpu = time.perf_counter() - started, time.process_time() - cpu
    what = "simulate 100,000 runs on 10,000 nodes, CPU time"
    record("simulate", what=what, value=cpu, unit="s", figure="<= 60", wall_s=round(took, 1))


if __name__ == "__main__":
    main()
