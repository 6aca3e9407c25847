"""Input and result of the scheduling policy as frozen data. Does not depend on a database."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Final, NamedTuple

# a run without limit may last this many times its predicted duration
PREDICTION_MARGIN: Final = 1.25


class Size(NamedTuple):
    """A smaller size of an elastic run: its devices, and its step time over that of the largest."""

    devices: int
    slowdown: float = 1.0


@dataclass(frozen=True, slots=True)
class QueuedRun:
    """A queued run; only `checkpoint_nodes`, if any, store its checkpoint.

    An elastic run has `smaller` sizes too. With `keeps_place` it has just ended to continue on
    another size, so it gets its smallest one before other runs are tried.

    Its last attempt failed on the nodes of `avoid`: until `avoid_until` (Unix seconds) it uses
    them only if no others can ever fit it, or if they store its checkpoint.
    """

    run: int
    devices: int
    pool: str
    queued_at: float  # Unix seconds
    priority: int = 0
    owner: str = ""
    device: str | None = None
    needs: tuple[str, ...] = ()  # what its nodes must support, of `NodeView.supports`
    not_before: float | None = None
    max_seconds: float | None = None
    checkpoint_nodes: tuple[str, ...] = ()
    avoid: tuple[str, ...] = ()
    avoid_until: float | None = None
    server: str = ""  # why it waits for a server, if it does
    team: str = ""
    expected_s: float | None = None  # predicted duration, None if unknown
    min_seconds: float = 0.0  # it holds its devices for at least this long
    together: int = 1  # each node gets a multiple of this many devices: a tensor-parallel group
    stages: int = 1  # of its pipeline
    pipeline_close: bool = False  # they communicate more than the ranks of a stage
    smaller: tuple[Size, ...] = ()  # largest first
    keeps_place: bool = False
    most: int = 0  # of an elastic run at one of its sizes: its largest size
    undivided: bool = False  # every size needs one node, because only one can read its checkpoint

    @property
    def least(self) -> int:
        """Devices of its smallest size."""
        return self.smaller[-1].devices if self.smaller else self.devices

    @property
    def smallest(self) -> QueuedRun:
        """The run at its smallest size."""
        return self.at(self.least)

    @property
    def sizes(self) -> tuple[int, ...]:
        """The numbers of devices on which it may run, largest first."""
        return (self.devices, *(size.devices for size in self.smaller))

    def undivided_on(self, most: int) -> QueuedRun:
        """The run with only its sizes up to `most`, each on one node; unchanged if none is left."""
        fitting = [size for size in self.sizes if size <= most]
        if not fitting:
            return self
        factor = next((size.slowdown for size in self.smaller if size.devices == fitting[0]), 1.0)
        left = (size for size in self.smaller if size.devices < fitting[0])
        smaller = tuple(Size(size.devices, size.slowdown / factor) for size in left)
        largest = replace(self.at(fitting[0]), smaller=smaller, most=0, undivided=True)
        return largest if smaller else replace(largest, together=largest.devices)

    def at(self, devices: int) -> QueuedRun:
        """The run at one of its sizes, which it then does not change."""
        if not self.smaller:
            return self
        slowdown = next((size.slowdown for size in self.smaller if size.devices == devices), 1.0)
        lasts = self.expected_s * slowdown if self.expected_s is not None else None
        if lasts is not None and self.max_seconds is not None:
            lasts = min(lasts, self.max_seconds)
        together = devices if self.undivided else self.together
        return replace(
            self,
            devices=devices,
            expected_s=lasts,
            smaller=(),
            most=self.devices,
            together=together,
        )

    @property
    def longest_s(self) -> float:
        """How long it may last: its limit, else its predicted duration with a margin; else inf."""
        if self.max_seconds is not None:
            return self.max_seconds
        return PREDICTION_MARGIN * self.expected_s if self.expected_s is not None else math.inf


@dataclass(frozen=True, slots=True)
class Share:
    """Devices of one node, by index."""

    node: str
    devices: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Placement:
    """A run that starts now."""

    run: int
    shares: tuple[Share, ...]

    @property
    def devices(self) -> int:
        """Number of its devices."""
        return sum(len(share.devices) for share in self.shares)


@dataclass(frozen=True, slots=True)
class Wait:
    """A run that waits; `may_start` (Unix seconds) is its latest start, None if unknown.

    `lacks_devices`: nothing but devices is missing, so it would start if others stopped.
    """

    run: int
    position: int
    reason: str
    may_start: float | None = None
    lacks_devices: bool = False


@dataclass(frozen=True)
class Decision:
    """Result of one pass: each queued run is placed or waits."""

    placements: tuple[Placement, ...] = ()
    waits: tuple[Wait, ...] = ()
