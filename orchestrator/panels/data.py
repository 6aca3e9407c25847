"""Drawable data of one panel: plain values that JSON carries, so a report can store them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

# Why a panel draws nothing. Pages have a sentence for each.
EmptyCode = Literal[
    "no_runs",  # the source has no run that the viewer sees
    "no_source",  # the source is gone, or belongs to users outside the viewer's teams
    "bad_query",  # the source's query cannot be read
    "gone",  # no run has the metric
    "no_match",  # no name matches the pattern
    "no_points",  # runs have the metric, without values that can be drawn
    "no_axis",  # runs have no tokens or FLOPs
]


@dataclass(frozen=True, slots=True)
class Empty:
    """Why a panel draws nothing: `subject` is the metric, pattern or query; `near` a known name."""

    code: EmptyCode
    subject: str = ""
    near: str = ""
    detail: str = ""


@dataclass(frozen=True, slots=True)
class PanelRun:
    """A run of a panel."""

    id: str
    name: str
    state: str


@dataclass(frozen=True, slots=True)
class PanelData:
    """`content` depends on the kind (README); `missing` names metrics that no run has.

    `hidden_runs`: runs of the source that the viewer does not see; `more_runs`: the source has more
    than its limit; `active`: a run may still log.
    """

    kind: str
    title: str = ""
    unit: str = ""
    runs: tuple[PanelRun, ...] = ()
    content: Mapping[str, Any] = field(default_factory=dict)
    missing: tuple[str, ...] = ()
    hidden_runs: int = 0
    more_runs: bool = False
    active: bool = False
    empty: Empty | None = None

    def to_dict(self) -> dict[str, Any]:
        """JSON data; numbers that are not finite are still floats."""
        return asdict(self)
