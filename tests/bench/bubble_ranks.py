"""A rank of the bubbles benchmark: pads each action of its pipeline stages by sleep to a duration.

Does not depend on the prediction.
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
    """Runs `spec` and returns its outcome; an action of a kind (F, B, I, W) lasts at least
    `seconds[kind]`.
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
