"""The current step and phase of this rank, reported to the beacon, the time breakdown and the
arrival tracker.

Does not depend on models or plans.
"""

from __future__ import annotations

from workers.metrics.beacon import Beacon
from workers.training.parallel.arrival_skew import ArrivalTracker
from workers.training.trace.time_breakdown import StepTimeBreakdown


class Progress:
    """`step` is the last finished step. Entering a phase is a sign of life for the supervisor."""

    def __init__(
        self, beacon: Beacon, time_breakdown: StepTimeBreakdown, arrivals: ArrivalTracker
    ) -> None:
        self.beacon, self.time_breakdown, self.arrivals = beacon, time_breakdown, arrivals
        self.step = 0

    @property
    def phase(self) -> str:
        """The phase entered last."""
        return self.beacon.phase

    def enter(self, phase: str) -> None:
        """Start `phase`; the first `forward` of a step is this rank's arrival."""
        self.beacon.mark(phase, step=self.step)
        self.time_breakdown.phase(phase)
        if phase == "forward":
            self.arrivals.begin()
