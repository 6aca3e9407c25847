"""What a server's engine thread tells while it goes: signs of life, points, and a line for every
request that ended.

Called in that thread alone. Knows files; decides nothing.
"""

from __future__ import annotations

import os
from pathlib import Path

from workers.contracts.wire.serving_reports import RequestStats
from workers.inference.engine import Engine
from workers.inference.liveness import COMPUTES, IDLES, mark_engine_layers
from workers.inference.metrics import EngineMetrics
from workers.inference.request import Request
from workers.inference.server.observe.engine_state import told
from workers.inference.server.observe.finished_requests import Ended
from workers.metrics.beacon import Beacon
from workers.metrics.recorder import Recorder

REQUESTS = "requests.jsonl"


class Witness:
    """`summary` has what became of all requests."""

    def __init__(
        self, engine: Engine, recorder: Recorder, beacon: Beacon, folder: Path, *, since_s: float
    ) -> None:
        self.engine, self.beacon, self.since_s = engine, beacon, since_s
        self.summary = Ended()
        self.measure = EngineMetrics(engine, recorder)
        self._file = os.open(folder / REQUESTS, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        mark_engine_layers(engine, beacon)

    def began(self) -> None:
        self.beacon.watch_me()
        self.idle()

    def stepping(self) -> None:
        self.beacon.mark(COMPUTES, step=self.engine.counts.steps)

    def stepped(self) -> None:
        self.measure.stepped()

    def idle(self) -> None:
        self.beacon.mark(IDLES, step=self.engine.counts.steps)
        self.measure.idled()

    def ended(self, request: Request, ticket: str) -> None:
        self.measure.ended(request)
        line: RequestStats = told(request, ticket, since_s=self.since_s)
        self.summary.add(line)
        os.write(self._file, line.model_dump_json().encode() + b"\n")

    def close(self) -> None:
        self.measure.close()
        os.close(self._file)
