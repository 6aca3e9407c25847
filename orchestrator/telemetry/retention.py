"""What is not kept for ever: live frames, logs of ended runs, and the single points of old series.

Thinning empties a chunk's data and keeps its summary, so charts keep every spike; only exports lose detail.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Final

from django.conf import settings

from orchestrator.common import live
from orchestrator.telemetry.models import Chunk, LogChunk

_BATCH: Final = 2000  # rows a transaction: one SQLite writer must not keep the others waiting


@dataclass(frozen=True, slots=True)
class Retained:
    frames: int
    log_chunks: int
    chunks: int


def retain(*, now: datetime) -> Retained:
    """Deletes and thins what the settings no longer keep; tells how many rows each. Safe to call at any time."""
    env = settings.ENV
    return Retained(
        frames=live.prune(before=now - timedelta(seconds=env.retain_frames_s)),
        log_chunks=_logs(now - timedelta(days=env.retain_logs_days)) if env.retain_logs_days else 0,
        chunks=_thin(now - timedelta(days=env.retain_series_days)) if env.retain_series_days else 0,
    )


def _logs(before: datetime) -> int:
    deleted = 0
    old = LogChunk.objects.filter(time__lt=before, run__ended__lt=before)
    while ids := list(old.order_by("time").values_list("id", flat=True)[:_BATCH]):
        deleted += LogChunk.objects.filter(id__in=ids).delete()[0]
    return deleted


def _thin(before: datetime) -> int:
    """Full chunks only, of runs that have ended: an open chunk is still extended from its data."""
    thinned = 0
    while ids := list(
        Chunk.objects.filter(level=0, last_time__lt=before.timestamp(), series__run__ended__lt=before, series__open=0)
        .exclude(data=b"")
        .values_list("id", flat=True)[:_BATCH]
    ):
        thinned += Chunk.objects.filter(id__in=ids).update(data=b"")
    return thinned
