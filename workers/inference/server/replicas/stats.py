"""What the other replicas of a run tell the first of their requests: each its tally when it ends,
wherever it runs.

Of one that was killed before, the lines that it wrote count, where its folder is on this node.
Knows no HTTP.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from pydantic import ValidationError

from workers.contracts.wire.serving_reports import ReplicaStats, RequestStats
from workers.inference.server.observe.finished_requests import Ended
from workers.inference.server.observe.observer import REQUESTS

_LOOK_S = 0.02


class Others:
    """`ranks` lead the other replicas.

    Whatever their files held when this was made is of earlier attempts.
    """

    def __init__(self, directory: Path, ranks: Sequence[int]) -> None:
        self._files = {rank: directory / f"rank-{rank}" / REQUESTS for rank in ranks}
        self._began = {
            rank: path.stat().st_size for rank, path in self._files.items() if path.is_file()
        }
        self._told: dict[int, tuple[ReplicaStats, float]] = {}

    def hear(self, tally: ReplicaStats) -> None:
        """Raises ValueError for a rank that leads no other replica."""
        if tally.rank not in self._files:
            raise ValueError(
                f"rank {tally.rank} leads no other replica; there are {sorted(self._files)}"
            )
        self._told[tally.rank] = (tally, time.perf_counter())

    async def heard(self, *, until: float) -> None:
        """Every replica, or that time of the monotonic clock."""
        while len(self._told) < len(self._files) and time.monotonic() < until:
            await asyncio.sleep(_LOOK_S)

    @property
    def count(self) -> int:
        return sum(sum(tally.finishes.values()) for tally, _ in self._told.values())

    def add_to(self, ended: Ended, *, since_s: float) -> int:
        """All that is known of theirs, for a server that began at `since_s`; of how many replicas
        nothing is.
        """
        silent = 0
        for rank, path in self._files.items():
            if rank in self._told:
                tally, at_s = self._told[rank]
                ended.merge(tally, seconds=at_s - since_s)
            elif path.is_file():
                for request in self._lines(rank):
                    ended.add(request)
            else:
                silent += 1
        return silent

    def _lines(self, rank: int) -> Iterator[RequestStats]:
        with open(self._files[rank], "rb") as file:
            file.seek(self._began.get(rank, 0))
            for line in file:
                try:
                    yield RequestStats.model_validate_json(line)
                except ValidationError:
                    continue  # being written
