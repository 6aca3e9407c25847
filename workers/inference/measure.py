"""What a run tells of its engine: a point now and then, and one at the end. Knows clocks and counts; no tensors."""

from __future__ import annotations

import time

from workers.inference.engine import Engine
from workers.inference.request import Request
from workers.metrics.recorder import Recorder

EVERY_S = 0.5


class Measure:
    """Means are over what ended, rates over the time, since the last point. TTFT counts from when a request was added;
    TPOT is the mean time between two tokens of one answer."""

    def __init__(self, engine: Engine, recorder: Recorder) -> None:
        self.engine, self.recorder = engine, recorder
        self._at, self._tokens, self._steps = time.perf_counter(), 0, 0
        self._ttft_s: list[float] = []
        self._tpot_s: list[float] = []

    def ended(self, request: Request) -> None:
        self._ttft_s.append(request.first_token_s - request.added_s)
        if len(request.new_tokens) > 1:
            self._tpot_s.append((request.last_token_s - request.first_token_s) / (len(request.new_tokens) - 1))

    def stepped(self) -> None:
        if time.perf_counter() - self._at >= EVERY_S:
            self._tell()

    def close(self) -> None:
        if self.engine.counts.steps > self._steps:
            self._tell()

    def _tell(self) -> None:
        counts, scheduler, now = self.engine.counts, self.engine.scheduler, time.perf_counter()
        values = {
            "inference/tokens_per_s": (counts.new_tokens - self._tokens) / (now - self._at),
            "inference/running": float(len(scheduler.running)),
            "inference/waiting": float(len(scheduler.waiting)),
            "inference/kv_blocks_used": float(scheduler.pool.used),
            "inference/preemptions": float(scheduler.preemptions),
            "inference/prompt_tokens": float(counts.prompt_tokens),
            "inference/shared_tokens": float(counts.shared_tokens),
        }
        for name, seconds in (("ttft_s", self._ttft_s), ("tpot_s", self._tpot_s)):
            if seconds:
                values[f"inference/{name}"] = sum(seconds) / len(seconds)
                seconds.clear()
        self.recorder.point(step=counts.steps, tokens=counts.prompt_tokens + counts.new_tokens, values=values)
        self._at, self._tokens, self._steps = now, counts.new_tokens, counts.steps
