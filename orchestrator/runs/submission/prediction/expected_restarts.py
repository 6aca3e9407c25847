"""How often a run is expected to restart because a node failed, and what each restart costs.

The rate is that of the pool's own attempts, pulled toward a published one while they are few.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from typing import Final

from orchestrator.common import clock
from orchestrator.runs.models import Attempt
from workers.contracts.exit_classes import ExitClass

# failures per node-second of Llama 3's training: 419 on 2,048 nodes in 54 days, 3.8 per 1,000
# node-days (arXiv 2407.21783, table 5); Meta's research clusters had 2.34 and 6.50 (arXiv
# 2410.21680)
PUBLISHED_RATE: Final = 419 / (2048 * 54 * 86400)
_PRIOR_FAILURES: Final = 0.5  # the published rate counts as much as half an own failure (Jeffreys)
_SINCE: Final = timedelta(days=90)
_MOST_ATTEMPTS: Final = 5000
# a class counts if the cause is the node or its network and not the program
_FAILURES: Final = frozenset({ExitClass.INFRASTRUCTURE, ExitClass.LOST})
_LIFE_S: Final = 60.0  # forms and sweeps predict many runs within a minute
_MOST_POOLS: Final = 200
_DETECT_S: Final = 30.0  # until a silent node is declared lost, and the back-off


@dataclass(frozen=True)
class FailureRate:
    """Failures per node-second, and the failures and node-seconds of the pool behind it."""

    per_node_s: float
    failures: int
    node_s: float

    def restarts(self, *, nodes: int, seconds: float) -> float:
        """The expected number of failures of so many nodes in this time."""
        return self.per_node_s * nodes * seconds


_rates: dict[str, tuple[float, FailureRate]] = {}  # pool → when it was read, and the rate


def failure_rate(*, pool: str) -> FailureRate:
    """The rate of the pool's attempts that ended in the last 90 days; at most a minute old."""
    read, rate = _rates.get(pool, (-math.inf, None))
    if rate is None or time.monotonic() - read >= _LIFE_S:
        rate = _read_rate(pool)
        if len(_rates) >= _MOST_POOLS:
            _rates.clear()
        _rates[pool] = time.monotonic(), rate
    return rate


def forget_rates() -> None:
    """Read the rates of all pools again at their next use."""
    _rates.clear()


def _read_rate(pool: str) -> FailureRate:
    rows = (
        Attempt.objects.filter(run__pool_name=pool, ended__gte=clock.now() - _SINCE)
        .order_by("-ended")
        .only("placement", "created", "launched", "ended", "exit_class")[:_MOST_ATTEMPTS]
    )
    return rate_of(_node_times(rows))


def _node_times(attempts: Iterable[Attempt]) -> Iterator[tuple[int, float, bool]]:
    """`(nodes, seconds, failed)` of ended attempts; without those that never held a node."""
    for attempt in attempts:
        if attempt.held_from is not None and attempt.ended is not None:
            seconds = (attempt.ended - attempt.held_from).total_seconds()
            yield len(attempt.placement), seconds, attempt.exit_class in _FAILURES


def rate_of(attempts: Iterable[tuple[int, float, bool]]) -> FailureRate:
    """The rate of `(nodes, seconds, failed)`: a gamma prior at the published rate."""
    failures, node_s = 0, 0.0
    for nodes, seconds, failed in attempts:
        failures += failed
        node_s += nodes * max(0.0, seconds)
    rate = (_PRIOR_FAILURES + failures) / (_PRIOR_FAILURES / PUBLISHED_RATE + node_s)
    return FailureRate(rate, failures, node_s)


def restarts_s(
    rate: FailureRate, *, nodes: int, work_s: float, start_s: float, checkpoint_s: float | None
) -> float:
    """Expected seconds that restarts add to `work_s` seconds.

    Each costs the detection, another start and half of the time between checkpoints, or half of
    the work without checkpoints (arXiv 2410.21680: u0 + T/2). Failures during repeated work are
    of second order and not counted.
    """
    lost = work_s if checkpoint_s is None else min(checkpoint_s, work_s)
    return rate.restarts(nodes=nodes, seconds=work_s) * (_DETECT_S + start_s + lost / 2)
