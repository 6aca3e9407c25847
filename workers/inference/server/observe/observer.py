"""Records the engine's events: liveness marks, points, and a line per finished request.

All methods are called in the engine's thread.
"""

from __future__ import annotations

import os
from pathlib import Path

from workers.inference.engine import Engine
from workers.inference.liveness import COMPUTES, IDLES, mark_engine_layers
from workers.inference.metrics import EngineMetrics
from workers.inference.request import Request
from workers.inference.server.observe.engine_state import request_stats
from workers.inference.server.observe.finished_requests import FinishedRequests
from workers.metrics.beacon import Beacon
from workers.metrics.recorder import Recorder

REQUESTS = "requests.jsonl"


class EngineObserver:
    """`finished` has the totals over all finished requests."""

    def __init__(
        self, engine: Engine, recorder: Recorder, beacon: Beacon, folder: Path, *, since_s: float
    ) -> None:
        self.engine, self.beacon, self.since_s = engine, beacon, since_s
        self.finished = FinishedRequests()
        self.metrics = EngineMetrics(engine, recorder)
        self._file = os.open(folder / REQUESTS, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        mark_engine_layers(engine, beacon)

    def thread_started(self) -> None:
        """Let the beacon watch this thread."""
        self.beacon.watch_me()
        self.idle()

    def step_started(self) -> None:
        """Mark that the engine computes."""
        self.beacon.mark(COMPUTES, step=self.engine.counts.steps)

    def step_finished(self) -> None:
        """Write a point if one is due."""
        self.metrics.step_finished()

    def idle(self) -> None:
        """Mark that the engine is alive and has nothing to compute."""
        self.beacon.mark(IDLES, step=self.engine.counts.steps)
        self.metrics.idle()

    def request_finished(self, request: Request, name: str) -> None:
        """Count the request and write its line."""
        self.metrics.request_finished(request)
        stats = request_stats(request, name, since_s=self.since_s)
        self.finished.add(stats)
        os.write(self._file, stats.model_dump_json().encode() + b"\n")

    def close(self) -> None:
        """Write the last point and close the file."""
        self.metrics.close()
        os.close(self._file)
