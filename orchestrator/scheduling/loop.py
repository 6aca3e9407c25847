"""The scheduler's loop: handles reports, wake-ups and a timer while it holds the lease.

The timer alone suffices. Failures of the database or Redis only delay it. Does not implement
placement or the end of attempts.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

from django.conf import settings
from django.db import DatabaseError, InterfaceError, close_old_connections, connection
from redis.exceptions import RedisError

from orchestrator.common import clock, redis, streams
from orchestrator.device_history.recorder import Recorder
from orchestrator.fleet import broker_users
from orchestrator.fleet import selectors as fleet
from orchestrator.scheduling import lease
from orchestrator.scheduling.accounting import ledger
from orchestrator.scheduling.accounting.held import held_within
from orchestrator.scheduling.cluster_engines.watcher import Watcher
from orchestrator.scheduling.periodic_checks import open_attempts, open_fences, reap
from orchestrator.scheduling.preemption import windows
from orchestrator.scheduling.preemption.growth import Growth
from orchestrator.scheduling.reports import control_versions, heartbeat_handler, revocation
from orchestrator.scheduling.reports.delivery import Delivery
from orchestrator.scheduling.reports.handler import report
from orchestrator.scheduling.reports.inbox import Entry, Inbox
from orchestrator.scheduling.reports.silence import POLL_S, liveness
from orchestrator.scheduling.tick import RemainingDecision, tick
from workers.contracts.wire import names
from workers.contracts.wire.broker.tls import tls_options

log = logging.getLogger(__name__)
_BURST = 100  # reports handled between two ticks
_PRUNE_EVERY_S = 600.0
_SETTLE_EVERY_S = 3.0
_USERS_EVERY_S = 60.0


class Watched:
    """Whose heartbeats and leases are polled: read again after a change, and every few seconds.

    Reading 1,000 nodes and attempts from the database each second took a quarter of the CPU time
    of heartbeats.
    """

    MOST_S = 5.0  # what other processes change, such as the removal of a node

    def __init__(self) -> None:
        self._until = 0.0
        self.nodes: list[str] = []
        self.fences: dict[str, list[str]] = {}

    def changed(self) -> None:
        """Read again at the next poll."""
        self._until = 0.0

    def refresh(self) -> None:
        """Read the nodes and the fences of open attempts, if it is time."""
        now = time.monotonic()
        if now >= self._until:
            self.nodes, self.fences = fleet.node_names(), open_fences()
            self._until = now + self.MOST_S


class _Services:
    """The threads of the process that holds the lease; the lease is renewed until the end."""

    def __init__(self, holder: str, drained: Callable[[], bool]) -> None:
        self.renewal = lease.Renewal(holder)
        self.engines = Watcher(drained)
        self.engines.start()
        recorder = Recorder(held_within)
        recorder.start()
        self._all = (recorder, self.engines, self.renewal)

    def close(self) -> None:
        """Stop all, and wait until their threads have ended."""
        for service in self._all:
            service.close()


class Loop:
    """One scheduler process; `run` works until `stop`."""

    def __init__(self) -> None:
        self.holder = lease.new_holder()
        self._stopping = threading.Event()
        self._delivery = Delivery(_handle_report)
        self._inbox: Inbox | None = None
        self._growth = Growth()
        self._tick_due = 0.0
        self._checks_due = 0.0
        self._poll_due = 0.0
        self._prune_due = 0.0
        self._settle_due = 0.0
        self._users_due = 0.0
        self._broker_start: str | None = None
        self._rest: RemainingDecision | None = None
        self._services: _Services | None = None
        self._watched = Watched()

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
            self._end_services()
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
            control_versions.publish()
            self._keep_users(time.monotonic())
            nodes = fleet.node_names()  # fails without the database, so before anything starts
            inbox = Inbox(_connect, consumer=self.holder)
            self._services = _Services(self.holder, self._drained)
            inbox.start(nodes)
            self._inbox = inbox
            self._watched.changed()
        if self._services is not None:
            self._services.renewal.alive()
        due = min(self._tick_due, self._checks_due, self._poll_due)
        if not self._delivery.empty:
            due = min(due, time.monotonic() + 0.2)
        entry = self._delivery.due() or self._inbox.get(due - time.monotonic())
        wake = False
        if entry is not None:
            self._watched.changed()
            wake = self._handle(self._inbox, entry)
        wake = self._poll_heartbeats() or wake
        now = time.monotonic()
        if now >= self._checks_due:
            if not lease.hold(self.holder, beat=True):
                log.warning("Another scheduler holds the lease; waiting")
                self._inbox.stop()
                self._inbox = None
                self._end_services()
                self._delivery = Delivery(_handle_report)  # the next holder claims its entries
                return
            self._checks_due = now + settings.ENV.tick_s
            control_versions.publish()
            self._keep_users(now)
            wake = reap(drained=self._drained()) > 0 or wake
            windows.clear(now=clock.now())
            self._growth.grow(now=clock.now())
            self._prune(now)
            self._settle(now)
        if wake and self._services is not None:
            self._services.engines.wake()
        if wake or now >= self._tick_due:
            result = tick(rest=self._rest)
            self._rest = result.rest
            if result.placed:
                self._watched.changed()
            self._tick_due = time.monotonic() + (0.0 if result.more else settings.ENV.tick_s)
        self._inbox.flush()

    def _drained(self) -> bool:
        """Whether all reports that have arrived are applied."""
        return self._inbox is not None and self._inbox.drained and self._delivery.empty

    def _end_services(self) -> None:
        if self._services is not None:
            self._services.close()
            self._services = None

    def _poll_heartbeats(self) -> bool:
        """Read heartbeats once per POLL_S; True if a node is back or changed."""
        if time.monotonic() < self._poll_due:
            return False
        self._poll_due = time.monotonic() + POLL_S
        watched = self._watched
        watched.refresh()
        if self._inbox is not None:
            self._inbox.watch(watched.nodes)
        beats = liveness.poll(redis.quick_client(), watched.nodes, watched.fences)
        return bool(beats) and heartbeat_handler.apply(
            beats, broker_ahead_s=liveness.broker_ahead_s
        )

    def _prune(self, now: float) -> None:
        if now >= self._prune_due:
            self._prune_due = now + _PRUNE_EVERY_S
            fences = {str(attempt.fence) for attempt in open_attempts()}
            revocation.prune(fences, fleet.node_names())
            _clean_reports()

    def _keep_users(self, now: float) -> None:
        """Create the nodes' users at the broker, again after its restart, and from time to time."""
        start = broker_users.broker_start()
        if start is not None and (start != self._broker_start or now >= self._users_due):
            self._users_due = now + _USERS_EVERY_S
            self._broker_start = start
            broker_users.apply_all()

    def _settle(self, now: float) -> None:
        """Account the device time of attempts that have ended."""
        if now >= self._settle_due:
            self._settle_due = now + _SETTLE_EVERY_S
            ledger.settle(now=clock.now())

    def _handle(self, inbox: Inbox, entry: Entry | None) -> bool:
        """Handle this entry and the following ones; True if a tick was requested."""
        wake, handled = False, 0
        while entry is not None:
            if entry.source is None:
                wake = True
            elif self._delivery.deliver(entry):
                inbox.acknowledge(entry.source)
            handled += 1
            # an entry that is taken from the inbox must be handled: it is not handed out again
            more = handled < _BURST
            entry = (self._delivery.due() or inbox.get(0.0)) if more else None
        if wake:
            self._checks_due = 0.0  # periodic_checks delivers requests to running attempts
        return wake


def _clean_reports() -> None:
    """Delete reports that were acknowledged, and streams of nodes that were removed."""
    nodes = fleet.node_names()
    shared = (names.JOINS, names.REPORTS)
    try:
        streams.clean(redis.client(), [*shared, *map(names.reports_stream, nodes)])
        broker_users.delete_unknown(nodes)
    except (RedisError, OSError) as error:
        log.warning("The streams of reports were not cleaned: %s", error)


def _handle_report(entry: Entry) -> bool:
    return report(entry.text, written=entry.written, retried=entry.retried is not None)


def _connect():  # type: ignore[no-untyped-def]
    """A connection for one thread; its timeout exceeds that of blocking reads."""
    import redis

    return redis.Redis.from_url(
        settings.REDIS_URL,
        socket_timeout=10,
        socket_connect_timeout=2,
        **tls_options(settings.REDIS_URL),
    )
