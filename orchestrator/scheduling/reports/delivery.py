"""Delivers each report to its handler: again after an outage, three times after an error.

A report that fails three times becomes a dead letter; later reports are never blocked by it. Does
not read streams; `inbox` does.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable
from typing import Final

import redis as redis_py

from orchestrator.common import redis
from orchestrator.dead_letters import failure_counts
from orchestrator.dead_letters.outages import is_outage
from orchestrator.dead_letters.services import dead_letter_add
from orchestrator.scheduling.reports.inbox import Entry
from workers.contracts.wire import names

log = logging.getLogger(__name__)
_RETRY_S: Final = 1.0


class Delivery:
    """Reports that are delivered again; `handle(text, written)` applies one."""

    def __init__(self, handle: Callable[[Entry], object]) -> None:
        self._handle = handle
        self._waiting: deque[tuple[float, Entry]] = deque()  # (due, entry), in order of due
        self._failures: dict[bytes, int] = {}

    def due(self) -> Entry | None:
        """A report that is due for another attempt."""
        if self._waiting and self._waiting[0][0] <= time.monotonic():
            return self._waiting.popleft()[1]
        return None

    @property
    def empty(self) -> bool:
        """Whether no report waits for another attempt."""
        return not self._waiting

    def deliver(self, entry: Entry) -> bool:
        """Apply the report; True if it is done and can be acknowledged.

        Raises the error of an outage; the report is delivered first afterwards.
        """
        assert entry.source is not None
        key = entry.source.key
        suspect = entry.claimed or key in self._failures
        count = self._begin(key) if suspect else 0
        if count > failure_counts.MAX_FAILURES:
            self._give_up(entry, f"Each of {count - 1} attempts ended the scheduler.")
            return True
        try:
            self._handle(entry)
        except Exception as error:
            if is_outage(error):
                if count:
                    self._failures[key] = count - 1
                self._waiting.appendleft((0.0, entry))
                raise
            count = count or self._begin(key)
            if count < failure_counts.MAX_FAILURES:
                log.exception("A report failed %d times; it is tried again", count)
                self._waiting.append((time.monotonic() + _RETRY_S, entry))
                return False
            log.exception("A report failed %d times and becomes a dead letter", count)
            self._give_up(entry, f"{type(error).__name__}: {error}")
            return True
        if suspect:
            self._forget(key)
        return True

    def _begin(self, key: bytes) -> int:
        """Count an attempt, in Redis so that an end of this process counts, else here."""
        count = self._failures.get(key, 0) + 1
        try:
            count = max(count, failure_counts.begin(redis.quick_client(), names.REPORTS, key))
        except (redis_py.RedisError, OSError):
            log.warning("Redis is unavailable; failures of reports are counted in memory")
        self._failures[key] = count
        return count

    def _give_up(self, entry: Entry, reason: str) -> None:
        assert entry.source is not None
        dead_letter_add(
            source="reports",
            node=names.node_of_stream(entry.source.stream) or "",
            code="failed",
            reason=reason,
            message=entry.text,
            written=entry.written,
        )
        self._forget(entry.source.key)

    def _forget(self, key: bytes) -> None:
        self._failures.pop(key, None)
        try:
            failure_counts.succeed(redis.quick_client(), names.REPORTS, key)
        except (redis_py.RedisError, OSError):
            log.warning("Redis is unavailable; a count of failures expires after a day")
