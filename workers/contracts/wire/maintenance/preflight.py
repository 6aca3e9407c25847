"""Preflight probes: what a launch order requests, what a node measures and reports.

Does not depend on how anything is measured or judged.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from workers.contracts.base import WireContract
from workers.contracts.specs.model import Count, Positive

# floating-point operations per second, bytes per second: memory traffic, and per rank on the wire
Measure = Literal["matmul", "memory", "all_reduce_node", "all_reduce"]
Rate = Annotated[float, Field(gt=0)]


class ProbeValue(WireContract):
    """One measured rate; `device` is null for collectives.

    `ranks` took part: measured at the same time on shared cores, or members of the collective.
    """

    measure: Measure
    device: Count | None = None
    ranks: Positive = 1
    value: Rate


class ProbeReference(WireContract):
    """The node's own record of a rate: the median of `samples` earlier values."""

    measure: Measure
    device: Count | None = None
    ranks: Positive = 1
    value: Rate
    samples: Positive


class Preflight(WireContract):
    """Measure the granted devices before the ranks start.

    A rate below `least_share` of its reference ends the attempt; one without reference is only
    recorded.
    """

    least_share: Annotated[float, Field(gt=0, le=1)]
    timeout_s: Annotated[float, Field(gt=0)] = 180.0
    references: list[ProbeReference] = []


class Shortfall(WireContract):
    """A rate that is too low, or a device that could not be measured."""

    measure: str
    device: Count | None = None
    value: float | None = None
    reference: float | None = None
    message: str


class PreflightReport(WireContract):
    """What a node measured before an attempt, and which rates are too low."""

    values: list[ProbeValue] = []
    shortfalls: list[Shortfall] = []
    seconds: Annotated[float, Field(ge=0)] = 0.0
    ranks: Positive = 1
