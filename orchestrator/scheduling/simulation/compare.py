"""Compares policies on one trace: the figures of each, and what charts need of them.

Does not depend on Django.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from orchestrator.scheduling.ordering.orders import ORDERS
from orchestrator.scheduling.simulation import measures, synthetic
from orchestrator.scheduling.simulation.elastic import simulate_elastic
from orchestrator.scheduling.simulation.simulate import Outcome, simulate
from orchestrator.scheduling.simulation.trace_statistics import STATISTICS
from orchestrator.scheduling.simulation.traces import Trace, TraceError

MOST_RUNS: Final = 1_000_000
MOST_DEVICES: Final = 1_000_000
_SYNTHETIC = re.compile(r"(?P<kind>[a-z]+):(?P<runs>\d{1,9}):(?P<seed>\d{1,9})", re.ASCII)


@dataclass(frozen=True)
class Setup:
    """The simulated cluster and the policies to compare."""

    nodes: int
    devices_per_node: int
    policies: tuple[str, ...]

    @property
    def devices(self) -> int:
        """All devices."""
        return self.nodes * self.devices_per_node

    def problem(self) -> str:
        """What is wrong with it, empty if nothing is."""
        for name, value in (("nodes", self.nodes), ("devices per node", self.devices_per_node)):
            if value < 1:
                return f"{name} is {value}; use at least 1"
        if self.devices > MOST_DEVICES:
            return f"the cluster has {self.devices:,} devices; use at most {MOST_DEVICES:,}"
        if not self.policies:
            return f"no policy given; use one or more of {', '.join(ORDERS)}"
        for name in self.policies:
            if name not in ORDERS:
                return f"unknown policy {name!r}; use one or more of {', '.join(ORDERS)}"
        return ""


def synthetic_trace(text: str, *, devices: int, most_runs: int = MOST_RUNS) -> Trace | None:
    """The trace that `KIND:RUNS:SEED` names, e.g. `philly:20000:1`; None for any other text.

    Raises TraceError for an unknown kind or a number out of range.
    """
    match = _SYNTHETIC.fullmatch(text)
    if match is None:
        kind = text.partition(":")[0]
        if ":" in text and kind in STATISTICS:
            raise TraceError(
                f"{text!r} is not a synthetic trace. Write {kind}:RUNS:SEED with whole numbers, "
                f"for example {kind}:20000:1."
            )
        return None
    kind, runs = match["kind"], int(match["runs"])
    if kind not in STATISTICS:
        raise TraceError(f"Unknown synthetic trace {kind!r}. Use {' or '.join(STATISTICS)}.")
    if not 1 <= runs <= most_runs:
        raise TraceError(f"{runs:,} runs; a trace has from 1 to {most_runs:,}.")
    return synthetic.draw(kind, runs=runs, seed=int(match["seed"]), devices=devices)


def compare(
    trace: Trace, setup: Setup, *, renew: Callable[[], None] | None = None
) -> dict[str, Any]:
    """`{runs, seconds, policies: {name: figures}}` of a trace on a cluster."""
    return _compare(trace, setup, renew)[0]


def compare_with_charts(
    trace: Trace, setup: Setup, *, renew: Callable[[], None] | None = None
) -> dict[str, Any]:
    """The result of `compare` with `charts {waits_s {name: […]}, utilization {…}, hours […]}`.

    `waits_s` holds the waiting time at each percent of the runs, from 0 to 100.
    """
    result, outcomes = _compare(trace, setup, renew)
    percent = np.arange(101)
    hours: list[float] = []
    waits, used = {}, {}
    for name in setup.policies:
        outcome = outcomes[name]
        values = np.percentile(measures.waits(trace, outcome), percent)
        waits[name] = [round(float(value), 1) for value in values]
        times, shares = measures.utilization_over_time(trace, outcome, devices=setup.devices)
        hours = [round(float(value) / 3600, 3) for value in times]
        used[name] = [round(float(value), 4) for value in shares]
    return {**result, "charts": {"waits_s": waits, "utilization": used, "hours": hours}}


def _compare(
    trace: Trace, setup: Setup, renew: Callable[[], None] | None
) -> tuple[dict[str, Any], dict[str, Outcome]]:
    started = time.perf_counter()
    outcomes: dict[str, Outcome] = {}

    def run(name: str) -> Outcome:
        if name not in outcomes:
            one = simulate_elastic if ORDERS[name].elastic else simulate
            outcomes[name] = one(
                trace,
                ORDERS[name],
                nodes=setup.nodes,
                devices_per_node=setup.devices_per_node,
                renew=renew,
            )
        return outcomes[name]

    figures = {
        name: measures.measure(trace, run(name), devices=setup.devices) for name in setup.policies
    }
    for name in setup.policies:
        figures[name]["starved"] = 0
        if measures.may_starve(trace, run(name)):
            mean = float(measures.waits(trace, run("fifo")).mean())
            figures[name]["starved"] = measures.starved(trace, run(name), fifo_mean_wait_s=mean)
    result = {
        "runs": len(trace),
        "seconds": round(time.perf_counter() - started, 3),
        "policies": {name: _rounded(values) for name, values in figures.items()},
    }
    return result, outcomes


def _rounded(figures: dict[str, float | int]) -> dict[str, float | int]:
    return {
        name: value if isinstance(value, int) else round(value, 6)
        for name, value in figures.items()
    }


def parse_policies(texts: Sequence[str] | str) -> tuple[str, ...]:
    """Names from a list or from a text with commas, each once."""
    names = texts.split(",") if isinstance(texts, str) else texts
    return tuple(dict.fromkeys(name.strip() for name in names if name.strip()))
