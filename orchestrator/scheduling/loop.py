"""The scheduler's loop: handles reports, wake-ups and a timer while it holds the lease.

The timer alone suffices. Failures of the database or Redis only delay it. Does not implement
placement or the end of attempts.
"""

from __future__ import annotations

import logging
import threading
import time

from django.conf import settings
from django.db import DatabaseError, InterfaceError, close_old_connections, connection

from orchestrator.scheduling import lease
from orchestrator.scheduling.reaper import reap
from orchestrator.scheduling.reports.handler import report
from orchestrator.scheduling.reports.inbox import Entry, Inbox
from orchestrator.scheduling.reports.presence import presence
from orchestrator.scheduling.tick import tick

log = logging.getLogger(__name__)
_BURST = 100  # reports handled between two ticks


class Loop:
    """One scheduler process; `run` works until `stop`."""

    def __init__(self) -> None:
        self.holder = lease.new_holder()
        self._stopping = threading.Event()
        self._inbox: Inbox | None = None
        self._tick_due = 0.0
        self._reap_due = 0.0

    def stop(self) -> None:
        """Request the end; callable from signal handlers."""
        self._stopping.set()
        if self._inbox is not None:
            self._inbox.stop()

    def run(self) -> None:
        """Handle events until `stop`."""
        try:
            while not self._stopping.is_set():
                try:
                    self._iterate()
                except (DatabaseError, InterfaceError) as error:
                    log.warning("The database is unavailable, retrying: %s", error)
                    connection.close()
                    self._stopping.wait(1.0)
        finally:
            if self._inbox is not None:
                self._inbox.stop()
                self._inbox.flush()
            try:
                lease.release(self.holder)
            except (DatabaseError, InterfaceError):
                log.warning(
                    "The lease was not released; it expires in %.0f s", lease.LIFE.total_seconds()
                )

    def _iterate(self) -> None:
        close_old_connections()
        if self._inbox is None:
            if not lease.hold(self.holder):
                self._stopping.wait(1.0)
                return
            log.info("Scheduling as %s", self.holder)
            presence.since = time.monotonic()
            self._inbox = Inbox(_connect, consumer=self.holder)
            self._inbox.start()
        entry = self._inbox.get(min(self._tick_due, self._reap_due) - time.monotonic())
        wake = entry is not None and self._handle(self._inbox, entry)
        now = time.monotonic()
        if now >= self._reap_due:
            if not lease.hold(self.holder, beat=True):
                log.warning("Another scheduler holds the lease; waiting")
                self._inbox.stop()
                self._inbox = None
                return
            self._reap_due = now + settings.ENV.tick_s
            wake = reap() > 0 or wake
        if wake or now >= self._tick_due:
            tick()
            self._tick_due = time.monotonic() + settings.ENV.tick_s
        self._inbox.flush()

    def _handle(self, inbox: Inbox, entry: Entry) -> bool:
        """Handle this entry and the following ones; True if a tick was requested."""
        wake = False
        for _ in range(_BURST):
            if entry.id is None:
                wake = True
            else:
                self._handle_report(entry.text)
                inbox.acknowledge(entry.id)
            following = inbox.get(0.0)
            if following is None:
                break
            entry = following
        if wake:
            self._reap_due = 0.0  # the reaper delivers requests to running attempts
        return wake

    def _handle_report(self, text: bytes) -> None:
        try:
            report(text)
        except (DatabaseError, InterfaceError):
            raise
        except Exception:
            log.exception("A report could not be handled and is dropped")


def _connect():  # type: ignore[no-untyped-def]
    """A connection for one thread; its timeout exceeds that of blocking reads."""
    import redis

    return redis.Redis.from_url(settings.REDIS_URL, socket_timeout=10, socket_connect_timeout=2)
