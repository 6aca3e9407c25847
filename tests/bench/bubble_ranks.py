"""A rank of the bubbles benchmark: trains with every action of its pipeline stages padded by sleep
to a given length.

Knows nothing of what is predicted.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.workers.training.pool import _run
from workers.training.trace.timeline import Timeline


def padded(spec: dict[str, Any], directory: str, seconds: dict[str, float]) -> dict[str, Any]:
    """The outcome of a run whose actions of each kind (F, B, I, W) last `seconds`, or as long as
    they take.
    """
    plain = Timeline.action

    @contextmanager
    def action(self: Timeline, kind: str, stage: int, micro_batch: int) -> Iterator[None]:
        with plain(self, kind, stage, micro_batch):
            until = time.perf_counter() + seconds[kind]
            yield
            time.sleep(max(0.0, until - time.perf_counter()))

    Timeline.action = action  # type: ignore[method-assign]
    try:
        return _run(spec, Path(directory), {})
    finally:
        Timeline.action = plain  # type: ignore[method-assign]
