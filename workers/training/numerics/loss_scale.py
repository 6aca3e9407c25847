"""Dynamic loss scaling for fp16 (arXiv 1710.03740, section 3.2): growth and backoff of the scale.

Pure state, equal on all ranks because they get the same input: an overflow on any rank counts on
all.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from workers.contracts.specs.plan import LossScale

# below it, scaling cannot prevent overflow: sums of fp16 products are too large themselves
_MIN_SCALE = 1.0


@dataclass(frozen=True, slots=True)
class ScaleChange:
    """A change of the scale."""

    old: float
    new: float
    reason: str


class LossScaler:
    """`scale` multiplies the loss; `quiet` counts updates since the last change of scale.

    `updates` and `skipped` count the run's updates, made and skipped.
    """

    def __init__(self, spec: LossScale, saved: dict[str, Any] | None = None) -> None:
        """`saved`: the `state` of the checkpoint to continue from."""
        self.spec = spec
        self.scale = float(saved["scale"]) if saved else spec.initial
        self.quiet = int(saved["quiet"]) if saved else 0
        # checkpoints of version 0.1 do not count; they exist after updates
        self.updates = int(saved.get("updates", 1)) if saved else 0
        self.skipped = int(saved.get("skipped", 0)) if saved else 0

    @property
    def state(self) -> dict[str, Any]:
        """For a checkpoint."""
        return {
            "scale": self.scale,
            "quiet": self.quiet,
            "updates": self.updates,
            "skipped": self.skipped,
        }

    @property
    def exhausted(self) -> bool:
        """Whether the scale is at its minimum."""
        return self.scale <= min(_MIN_SCALE, self.spec.initial)

    def overflowed(self) -> ScaleChange:
        """Reduce the scale after a step with non-finite gradients, whose update was skipped."""
        self.skipped += 1
        return self._set(
            max(self.scale * self.spec.backoff, min(_MIN_SCALE, self.spec.initial)), "overflow"
        )

    def updated(self) -> ScaleChange | None:
        """After an update: grow the scale after `growth_interval` updates in a row."""
        self.quiet += 1
        self.updates += 1
        if self.quiet < self.spec.growth_interval:
            return None
        return self._set(self.scale * self.spec.growth, "growth")

    def _set(self, scale: float, reason: str) -> ScaleChange:
        change = ScaleChange(self.scale, scale, reason)
        self.scale, self.quiet = scale, 0
        return change
