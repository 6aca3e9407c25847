"""Dynamic loss scaling for fp16 (arXiv 1710.03740, section 3.2): the scale, when it grows, when it
backs off.

Pure state, the same on every rank because every rank is told the same: an overflow anywhere is one
everywhere.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from workers.contracts.specs.plan import LossScale

# below it an overflow is no matter of scale: sums of fp16 products are too large by themselves
_LEAST = 1.0


@dataclass(frozen=True, slots=True)
class Change:
    old: float
    new: float
    reason: str


class LossScaler:
    """`scale` multiplies the loss; `quiet` counts steps since the last change of scale."""

    def __init__(self, spec: LossScale, kept: dict[str, Any] | None = None) -> None:
        """`kept`: what `state` was when the checkpoint to go on from was written."""
        self.spec = spec
        self.scale = float(kept["scale"]) if kept else spec.initial
        self.quiet = int(kept["quiet"]) if kept else 0

    @property
    def state(self) -> dict[str, Any]:
        return {"scale": self.scale, "quiet": self.quiet}

    @property
    def exhausted(self) -> bool:
        """At its smallest: another overflow cannot be helped by a smaller one."""
        return self.scale <= min(_LEAST, self.spec.initial)

    def overflowed(self) -> Change:
        """After a step whose gradients were not finite, and whose update was not made."""
        return self._set(
            max(self.scale * self.spec.backoff, min(_LEAST, self.spec.initial)), "overflow"
        )

    def updated(self) -> Change | None:
        """After an update: the scale grows when `growth_interval` of them went well in a row."""
        self.quiet += 1
        if self.quiet < self.spec.growth_interval:
            return None
        return self._set(self.scale * self.spec.growth, "growth")

    def _set(self, scale: float, reason: str) -> Change:
        change = Change(self.scale, scale, reason)
        self.scale, self.quiet = scale, 0
        return change
