"""What is not kept for ever: live frames, logs of ended runs, and the single points of old series.

Thinning empties a chunk's data and keeps its summary, so charts keep every spike; only exports lose
detail.
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
_BATCH: Final = 2000  # rows a transaction: one SQLite writer must not keep the others waiting


@dataclass(frozen=True, slots=True)
class Retained:
    frames: int
    log_chunks: int
    chunks: int


def retain(*, now: datetime) -> Retained:
    """Deletes and thins what the settings no longer keep; tells how many rows each.

    Safe to call at any time.
    """
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
        Chunk.objects.filter(
            level=0, last_time__lt=before.timestamp(), series__run__ended__lt=before, series__open=0
        )
        .exclude(data=b"")
        .values_list("id", flat=True)[:_BATCH]
    ):
        thinned += Chunk.objects.filter(id__in=ids).update(data=b"")
    return thinned


def keep_house(stop: threading.Event) -> None:
    """Retains once a minute until `stop`; a thread of its own beside ingest, so that a long pass
    delays no point.
    """
    while not stop.is_set():
        try:
            retain(now=clock.now())
            accounts.idempotent_purge(now=clock.now())
        except DatabaseError as error:
            log.warning("Old data stays a minute longer: %s", error)
        connection.close()
        stop.wait(_EVERY_S)
