"""Orders to delete and measure what runs left on a node, and the node's answers.

Paths are relative to the node's home and below `runs/`. Does not depend on any policy.
"""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from workers.contracts.base import WireContract
from workers.contracts.specs.model import Count
from workers.contracts.wire.points import Time

Path = Annotated[str, Field(min_length=1, max_length=500)]
MOST_ITEMS = 500  # per order or report


class CollectOrder(WireContract):
    """Delete these checkpoints and folders of ended runs; with `scan`, report all run folders.

    The folder of an attempt is deleted without its checkpoints, which have their own paths.
    """

    checkpoints: Annotated[list[Path], Field(max_length=MOST_ITEMS)] = []
    attempts: Annotated[list[Path], Field(max_length=MOST_ITEMS)] = []
    scan: bool = False


class Collected(WireContract):
    """A path that no longer exists, or why it remains; `bytes` were freed."""

    path: Path
    bytes: Count = 0
    problem: Annotated[str, Field(max_length=300)] = ""


class StoredRun(WireContract):
    """A folder below `runs/`: its size, and the time of its newest file.

    `attempts` has the bytes of each attempt's folder without its checkpoints, by its name.
    """

    name: Annotated[str, Field(min_length=1, max_length=255)]
    bytes: Count
    modified: Time
    attempts: dict[str, Count] = {}


class StorageReport(WireContract):
    """What was deleted, and, after a scan, the run folders; `complete`: none is left out."""

    collected: Annotated[list[Collected], Field(max_length=MOST_ITEMS * 2)] = []
    runs: Annotated[list[StoredRun], Field(max_length=MOST_ITEMS)] | None = None
    first: bool = True  # of the reports of a scan
