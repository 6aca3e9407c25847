"""What a probe of an idle node measures for the planner: rates of its devices, and training steps.

Does not depend on how anything is measured or used.
"""

from __future__ import annotations

from typing import Annotated, Any, Final, Literal

from pydantic import Field

from workers.contracts.base import WireContract
from workers.contracts.specs.model import Count, Positive

VERSION: Final = 1  # of the suite; results of another version are not used
SHORT_S: Final = 8.0  # of the probe before the first run of a new installation
FULL_S: Final = 60.0
MOST_S: Final = 600.0
# beyond this share of the cores in use by others, a node is busy
BUSY_SHARE: Final = 0.25

Above0 = Annotated[float, Field(gt=0, allow_inf_nan=False)]
# operations per second, bytes per second, of a collective bus bytes per second; `host`: seconds
NodeMeasure = Literal[
    "matmul",
    "attention",
    "memory",
    "host",
    "all_reduce",
    "all_gather",
    "reduce_scatter",
    "all_to_all",
    "send_recv",
]
UNITS: Final[dict[str, str]] = {"matmul": "FLOP/s", "attention": "FLOP/s", "host": "s"}


class NodeRate(WireContract):
    """One measured rate: the slowest of `ranks` that measured at the same time.

    `setting` is the shape and precision, or the size of the message.
    """

    measure: NodeMeasure
    setting: Annotated[str, Field(max_length=80)]
    ranks: Positive = 1
    value: Above0
    seconds: Above0 | None = None  # per call

    @property
    def unit(self) -> str:
        """The unit of `value`."""
        return UNITS.get(self.measure, "B/s")


class NodeStep(WireContract):
    """A training run of a few steps: the median of the faster half, and the fullest rank's peak."""

    model: dict[str, Any]
    plan: dict[str, Any]
    seq_len: Positive
    step_time_s: Above0
    slowest_s: Above0
    steps: Positive
    # of the first run only: later ones find memory that earlier ones have left
    peak_bytes: Positive | None = None


class NodeProbeReport(WireContract):
    """The result of one probe.

    `load` is the share of the cores that other programs used before it, `problems` what could not
    be measured.
    """

    version: Count = VERSION
    kind: Literal["gpu", "cpu"]
    device: Annotated[str, Field(max_length=80)]  # in the catalogue
    short: bool = False
    time: float
    seconds: Annotated[float, Field(ge=0)]
    ranks: Positive
    cores: Positive
    load: Annotated[float, Field(ge=0)] = 0.0
    versions: dict[str, str] = {}
    rates: Annotated[list[NodeRate], Field(max_length=500)] = []
    steps: Annotated[list[NodeStep], Field(max_length=64)] = []
    # seconds and bytes per second of a link between the ranks, as the planner counts them
    link: dict[str, Any] | None = None
    problems: list[str] = []


class NodeProbed(WireContract):
    """A node's answer to a requested probe: the report, or the reason for its absence."""

    report: NodeProbeReport | None = None
    problem: Annotated[str, Field(max_length=500)] = ""
