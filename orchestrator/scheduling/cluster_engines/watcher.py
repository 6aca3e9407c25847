"""A thread of the scheduler that passes over all engines, because their commands may block."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from datetime import datetime

from django.db import DatabaseError, InterfaceError, close_old_connections, connection

from orchestrator.common import clock
from orchestrator.fleet import broker_users
from orchestrator.fleet.cluster_engines import kinds, members
from orchestrator.fleet.models import Engine as EngineRow
from orchestrator.scheduling.cluster_engines import contact
from orchestrator.scheduling.cluster_engines.enqueue import engines_with_new_runs
from orchestrator.scheduling.cluster_engines.interface import EngineUnavailable
from orchestrator.scheduling.cluster_engines.late_points import LatePoints
from orchestrator.scheduling.cluster_engines.sync import sync

log = logging.getLogger(__name__)
_IDLE_S = 1.0
_EXPIRE_EVERY_S = 600.0
_LEAST_S = 0.5  # between two passes over an engine


class Watcher:
    """Runs while this process holds the scheduler's lease; `drained` as in `sync`."""

    def __init__(self, drained: Callable[[], bool]) -> None:
        self._drained = drained
        self._stopping = threading.Event()
        self._woken = threading.Event()
        self._due: dict[int, float] = {}
        self._last: dict[int, float] = {}
        self._passed: dict[int, datetime] = {}  # when, by the clock of `queued_at`
        self._expire_due = time.monotonic() + _EXPIRE_EVERY_S
        self._late = LatePoints()
        self._thread = threading.Thread(target=self._run, name="engines", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def wake(self) -> None:
        """Pass over engines with new runs soon, without waiting for their next turn."""
        self._woken.set()

    def close(self) -> None:
        """Stop; waits for the current pass, which ends within the time limits of commands."""
        self._stopping.set()
        self._woken.set()
        self._thread.join(timeout=5.0)

    def _run(self) -> None:
        while not self._stopping.is_set():
            try:
                close_old_connections()
                self._pass()
            except (DatabaseError, InterfaceError) as error:
                log.warning("The database is unavailable, retrying: %s", error)
                connection.close()
            except Exception:
                log.exception("A pass over the engines failed; it is repeated")
            self._woken.wait(_IDLE_S if not self._due else 0.25)
        contact.disconnect()
        self._late.close()
        connection.close()

    def _pass(self) -> None:
        now = time.monotonic()
        if now >= self._expire_due:
            self._expire_due = now + _EXPIRE_EVERY_S
            for name in members.members_expire(now=clock.now()):
                broker_users.remove_node(name)
        if self._woken.is_set():
            self._woken.clear()
            since = {id: self._passed[id] for id in self._due.keys() & self._passed.keys()}
            for id in sorted(engines_with_new_runs(since)):
                self._due[id] = min(self._due[id], self._last[id] + _LEAST_S)
        if self._due and now < min(self._due.values()):
            return
        rows = list(EngineRow.objects.prefetch_related("pools"))
        if gone := self._due.keys() - {row.pk for row in rows}:
            contact.disconnect(*gone)
        self._due = {row.pk: self._due.get(row.pk, now) for row in rows}
        for row in rows:
            if now < self._due[row.pk] or self._stopping.is_set():
                continue
            self._last[row.pk], self._passed[row.pk] = time.monotonic(), clock.now()
            try:
                settings = kinds.settings_of(row)
                sync(row, contact.connect(row), drained=self._drained)
            except EngineUnavailable as error:  # it has no usable login
                contact.failed(row, str(error))
            except (ValueError, OSError) as error:  # settings of another release, no CA file
                contact.failed(row, f"Its settings cannot be read: {error}")
                self._due[row.pk] = time.monotonic() + 60.0
                continue
            else:
                self._send_late(row)
            self._due[row.pk] = time.monotonic() + settings.poll_s

    def _send_late(self, row: EngineRow) -> None:
        """A failure here says nothing about the engine. Raises errors of the database."""
        try:
            self._late.poll(row)
        except (DatabaseError, InterfaceError):
            raise
        except Exception:
            log.exception("What supervisors of %s left cannot be sent", row.name)
