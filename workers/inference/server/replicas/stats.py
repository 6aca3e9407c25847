"""Collects the request statistics of the other replicas, which each sends when it ends.

For a replica that was killed, the lines of its requests.jsonl count if its folder is on this node.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from pydantic import ValidationError

from workers.contracts.wire.serving_reports import ReplicaStats, RequestStats
from workers.inference.server.observe.finished_requests import FinishedRequests
from workers.inference.server.observe.observer import REQUESTS

_POLL_S = 0.02


class ReplicaStatsCollector:
    """`ranks` are the first ranks of the other replicas.

    Lines that are in their files at creation belong to earlier attempts.
    """

    def __init__(self, directory: Path, ranks: Sequence[int]) -> None:
        self._files = {rank: directory / f"rank-{rank}" / REQUESTS for rank in ranks}
        self._offsets = {
            rank: path.stat().st_size for rank, path in self._files.items() if path.is_file()
        }
        self._received: dict[int, tuple[ReplicaStats, float]] = {}

    def receive(self, stats: ReplicaStats) -> None:
        """Store what a replica sent. Raises ValueError for any other rank."""
        if stats.rank not in self._files:
            raise ValueError(
                f"rank {stats.rank} is not the first rank of another replica; those are "
                f"{sorted(self._files)}"
            )
        self._received[stats.rank] = (stats, time.perf_counter())

    async def wait(self, *, until: float) -> None:
        """Wait for every replica, at most until that time of the monotonic clock."""
        while len(self._received) < len(self._files) and time.monotonic() < until:
            await asyncio.sleep(_POLL_S)

    @property
    def count(self) -> int:
        """Finished requests that were reported."""
        return sum(sum(stats.finishes.values()) for stats, _ in self._received.values())

    def add_to(self, finished: FinishedRequests, *, since_s: float) -> int:
        """Add everything known; the number of replicas of which nothing is known.

        `since_s` is when this server started.
        """
        silent = 0
        for rank, path in self._files.items():
            if rank in self._received:
                stats, received_s = self._received[rank]
                finished.merge(stats, seconds=received_s - since_s)
            elif path.is_file():
                for request in self._lines(rank):
                    finished.add(request)
            else:
                silent += 1
        return silent

    def _lines(self, rank: int) -> Iterator[RequestStats]:
        with open(self._files[rank], "rb") as file:
            file.seek(self._offsets.get(rank, 0))
            for line in file:
                try:
                    yield RequestStats.model_validate_json(line)
                except ValidationError:
                    continue  # an incomplete last line
