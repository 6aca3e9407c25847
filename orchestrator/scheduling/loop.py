"""The scheduler's loop: news and wake-ups as they come, a timer beside them, each alone enough. One
holder at a time.

Broken connections to database or Redis delay it, nothing else. Does not know how to place or to end
anything.
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
_BURST = 100  # reports acted upon between two ticks


class Loop:
    def __init__(self) -> None:
        self.holder = lease.new_holder()
        self._stopping = threading.Event()
        self._inbox: Inbox | None = None
        self._tick_due = 0.0
        self._reap_due = 0.0

    def stop(self) -> None:
        self._stopping.set()
        if self._inbox is not None:
            self._inbox.stop()

    def run(self) -> None:
        """Until `stop`."""
        try:
            while not self._stopping.is_set():
                try:
                    self._turn()
                except (DatabaseError, InterfaceError) as error:
                    log.warning("The database is away, trying again: %s", error)
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
                    "The lease was not given back; it lapses in %.0f s", lease.LIFE.total_seconds()
                )

    def _turn(self) -> None:
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
        wake = entry is not None and self._take(self._inbox, entry)
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

    def _take(self, inbox: Inbox, entry: Entry) -> bool:
        """Acts on this entry and those behind it; True when a tick was asked for."""
        wake = False
        for _ in range(_BURST):
            if entry.id is None:
                wake = True
            else:
                self._act(entry.text)
                inbox.done(entry.id)
            following = inbox.get(0.0)
            if following is None:
                break
            entry = following
        else:
            pass
        if wake:
            self._reap_due = 0.0  # a wish for a running attempt is the reaper's to deliver
        return wake

    def _act(self, text: bytes) -> None:
        try:
            report(text)
        except (DatabaseError, InterfaceError):
            raise
        except Exception:
            log.exception("A report could not be acted upon and is dropped")


def _connect():  # type: ignore[no-untyped-def]
    """A connection of a thread's own, whose timeout outlasts its blocking reads."""
    import redis

    return redis.Redis.from_url(settings.REDIS_URL, socket_timeout=10, socket_connect_timeout=2)
