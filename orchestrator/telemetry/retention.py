"""Deletes old live frames and logs of ended runs, and the single points of old series.

Thinning empties a chunk's data but not its summary: charts show every spike, exports lose detail.
"""

from __future__ import annotations

import logging
import threading
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Final

from django.conf import settings
from django.db import DatabaseError, connection

from orchestrator.accounts import services as accounts
from orchestrator.common import clock, live
from orchestrator.telemetry.models import Chunk, LogChunk

log = logging.getLogger(__name__)

_EVERY_S: Final = 60.0
_BATCH: Final = 2000  # rows per transaction, so that SQLite's other writers do not wait long


@dataclass(frozen=True, slots=True)
class RetentionResult:
    """Numbers of rows that one pass deleted or thinned."""

    frames: int
    log_chunks: int
    chunks: int


def retain(*, now: datetime) -> RetentionResult:
    """Delete and thin what exceeds the retention settings. Safe to call at any time."""
    env = settings.ENV
    log_chunks = chunks = 0
    frames = live.prune(before=now - timedelta(seconds=env.retain_frames_s))
    if env.retain_logs_days:
        log_chunks = _delete_logs(now - timedelta(days=env.retain_logs_days))
    if env.retain_series_days:
        chunks = _thin_series(now - timedelta(days=env.retain_series_days))
    return RetentionResult(frames, log_chunks, chunks)


def _delete_logs(before: datetime) -> int:
    deleted = 0
    old = LogChunk.objects.filter(time__lt=before, run__ended__lt=before)
    while ids := list(old.order_by("time").values_list("id", flat=True)[:_BATCH]):
        deleted += LogChunk.objects.filter(id__in=ids).delete()[0]
    return deleted


def _thin_series(before: datetime) -> int:
    """Thin full chunks of ended runs; an open chunk is still extended from its data."""
    thinned = 0
    while ids := list(
        Chunk.objects.filter(
            level=0, last_time__lt=before.timestamp(), series__run__ended__lt=before, series__open=0
        )
        .exclude(data=b"")
        .values_list("id", flat=True)[:_BATCH]
    ):
        thinned += Chunk.objects.filter(id__in=ids).update(data=b"")
    return thinned


def retention_loop(stop: threading.Event) -> None:
    """Apply retention once a minute until `stop`, in a thread so that ingest does not wait."""
    while not stop.is_set():
        try:
            retain(now=clock.now())
            accounts.idempotent_purge(now=clock.now())
        except DatabaseError as error:
            log.warning("Retention failed and is retried in a minute: %s", error)
        connection.close()
        stop.wait(_EVERY_S)
