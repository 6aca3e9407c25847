"""What a fit to measured runs leaves behind: values, where they were measured, how far they may be
off. JSON.

Knows no formula; `calibrate` makes it, `parameters` and `intervals` use it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from orchestrator.planner.calibration.coverage import Basis
from orchestrator.planner.model.terms import Table

VERSION = 1
# what belongs to a device more than to the framework that drives it
OF_DEVICE = (
    "gemm_efficiency",
    "memory_efficiency",
    "intra_efficiency",
    "inter_efficiency",
    "intra_latency_s",
    "inter_latency_s",
)


@dataclass(frozen=True)
class Group:
    """What was fitted for one device and framework.

    `values` of all parameters; `covariance` of the log of those `names` that step times rest on;
    `points`, `noise` and
    `weights` of the correction, its `scale` in log, how much `widening` intervals need near the
    runs, and the error
    `far` from them in log; `ranges` and `kinds` of what was measured (`basis`).
    """

    device: str
    framework: str
    rows: int
    values: dict[str, float]
    timed: int = 0
    names: list[str] = field(default_factory=list)
    covariance: list[list[float]] = field(default_factory=list)
    points: list[list[float]] = field(default_factory=list)
    noise: list[float] = field(default_factory=list)
    weights: list[float] = field(default_factory=list)
    scale: float = 0.0
    widening: float = 1.0
    far: float = 0.05
    ranges: dict[str, list[float]] = field(default_factory=dict)
    kinds: dict[str, list[int]] = field(default_factory=dict)
    weighed: int = 0
    memory_spread: float = 0.0

    @property
    def basis(self) -> Basis:
        return Basis(self.ranges, self.kinds)


@dataclass(frozen=True)
class Calibration:
    """Fitted groups, and the lines that could not be used.

    JSON through `to_dict` and `from_dict`.
    """

    groups: list[Group]
    left_out: list[dict[str, Any]] = field(default_factory=list)
    version: int = VERSION

    def group(self, device: str, framework: str) -> Group | None:
        return next(
            (each for each in self.groups if (each.device, each.framework) == (device, framework)),
            None,
        )

    def values_for(self, device: str, framework: str) -> dict[str, float]:
        """All values of the pair; what belongs to the device from another framework's runs on it;
        else nothing.
        """
        own = self.group(device, framework)
        if own is not None:
            return dict(own.values)
        other = max(
            (each for each in self.groups if each.device == device),
            key=lambda each: each.timed,
            default=None,
        )
        return (
            {name: other.values[name] for name in OF_DEVICE if name in other.values}
            if other
            else {}
        )

    def extrapolates(self, device: str, framework: str, table: Table, row: int = 0) -> list[str]:
        """Sentences on what of the plan no measured run covers; empty where it is among them."""
        own = self.group(device, framework)
        if own is None:
            return [
                f"no run of {framework} on {device} is in the calibration: default values are used"
            ]
        return own.basis.message(table, row)

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, document: Any) -> Calibration:
        """Raises ValueError for a document that is none, saying what to do."""
        version = document.get("version") if isinstance(document, Mapping) else None
        if version != VERSION or not isinstance(document.get("groups"), list):
            raise ValueError(
                f"not a calibration of version {VERSION} (found {version!r}); make it again from "
                "its runs"
            )
        try:
            groups = [
                Group(**{key: each[key] for key in Group.__dataclass_fields__ if key in each})
                for each in document["groups"]
            ]
        except (TypeError, KeyError) as error:
            raise ValueError(
                f"a group of the calibration is incomplete ({error}); make it again from its runs"
            ) from None
        return cls(groups, list(document.get("left_out", [])))
