"""The result of a calibration as JSON: parameter values, their uncertainty, the covered runs.

Made by `fit`; used by `parameters` and `intervals`. Does not depend on formulas.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from orchestrator.planner.model.coverage import Coverage
from orchestrator.planner.model.terms import Table

VERSION = 1
# parameters of the device rather than of the framework
DEVICE_PARAMETERS = (
    "gemm_efficiency",
    "memory_efficiency",
    "intra_efficiency",
    "inter_efficiency",
    "intra_latency_s",
    "inter_latency_s",
)


@dataclass(frozen=True)
class Group:
    """The fit for one device and framework.

    `values` of all parameters; `covariance` of the logs of `names`, on which step times depend;
    `points`, `noise` and `weights` of the correction and its `scale` in log; `widening` of the
    intervals near the runs, the log error `far` from them; `ranges` and `kinds` (`coverage`).
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
    def coverage(self) -> Coverage:
        """What the measured runs cover."""
        return Coverage(self.ranges, self.kinds)


@dataclass(frozen=True)
class Calibration:
    """Fitted groups, skipped lines and doubtful runs. JSON through `to_dict` and `from_dict`."""

    groups: list[Group]
    left_out: list[dict[str, Any]] = field(default_factory=list)
    version: int = VERSION
    doubtful: list[dict[str, Any]] = field(default_factory=list)

    def group(self, device: str, framework: str) -> Group | None:
        """The fit for this pair, or None."""
        return next(
            (item for item in self.groups if (item.device, item.framework) == (device, framework)),
            None,
        )

    def values_for(self, device: str, framework: str) -> dict[str, float]:
        """All values of the pair; else the device's values from another framework; else none."""
        own = self.group(device, framework)
        if own is not None:
            return dict(own.values)
        other = max(
            (item for item in self.groups if item.device == device),
            key=lambda item: item.timed,
            default=None,
        )
        return (
            {name: other.values[name] for name in DEVICE_PARAMETERS if name in other.values}
            if other
            else {}
        )

    def extrapolates(self, device: str, framework: str, table: Table, row: int = 0) -> list[str]:
        """Messages on what of the plan no run covers; empty if it is covered."""
        own = self.group(device, framework)
        if own is None:
            return [f"the calibration has no {framework} run on {device}: default values are used"]
        return own.coverage.describe_outside(table, row)

    def to_dict(self) -> dict[str, Any]:
        """The JSON document."""
        return asdict(self)

    @classmethod
    def from_dict(cls, document: Any) -> Calibration:
        """From a JSON document. Raises ValueError for an invalid one."""
        version = document.get("version") if isinstance(document, Mapping) else None
        if version != VERSION or not isinstance(document.get("groups"), list):
            raise ValueError(
                f"not a calibration of version {VERSION} but {version!r}; "
                "fit it again from its runs"
            )
        try:
            groups = [
                Group(**{key: item[key] for key in Group.__dataclass_fields__ if key in item})
                for item in document["groups"]
            ]
        except (TypeError, KeyError) as error:
            raise ValueError(
                f"a group of the calibration is incomplete ({error}); fit it again from its runs"
            ) from None
        return cls(
            groups,
            list(document.get("left_out", [])),
            doubtful=list(document.get("doubtful", [])),
        )
