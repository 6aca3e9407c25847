"""A thread per engine that passes over it in turn, so one that does not answer delays no other."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from datetime import datetime

from django.db import DatabaseError, InterfaceError, close_old_connections, connection

from orchestrator.common import clock
from orchestrator.fleet.cluster_engines import kinds
from orchestrator.fleet.models import Engine as EngineRow
from orchestrator.scheduling.cluster_engines import contact
from orchestrator.scheduling.cluster_engines.interface import EngineUnavailable
from orchestrator.scheduling.cluster_engines.late_points import LatePoints
from orchestrator.scheduling.cluster_engines.sync import sync

log = logging.getLogger(__name__)
LEAST_S = 0.5  # between two passes
UNREADABLE_S = 60.0  # until settings that cannot be read are read again


class EngineTurns:
    """Passes over one engine until `stop`; `drained` as in `sync`."""

    def __init__(self, id: int, drained: Callable[[], bool]) -> None:
        self.passed: datetime | None = None  # when the newest began, by the clock of `queued_at`
        self.due = 0.0
        self._id = id
        self._drained = drained
        self._last = float("-inf")
        self._is_soon = False
        self._stopping = threading.Event()
        self._woken = threading.Event()
        self._late = LatePoints()
        self._thread = threading.Thread(target=self._run, name=f"engine {id}", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def wake(self) -> None:
        """Pass soon, without waiting for the next turn; after the current pass if there is one."""
        self._is_soon = True
        self._woken.set()

    def stop(self) -> None:
        """Request the end; the thread ends with its current pass."""
        self._stopping.set()
        self._woken.set()

    def join(self, timeout_s: float) -> bool:
        """Wait for the thread; False if its pass takes longer."""
        if self._thread.ident is not None:
            self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def turn(self) -> None:
        """One pass, if it is due or requested."""
        due = min(self.due, self._last + LEAST_S) if self._is_soon else self.due
        if time.monotonic() < due:
            return
        self._is_soon = False
        row = EngineRow.objects.prefetch_related("pools").filter(pk=self._id).first()
        if row is None:
            return
        self._last, self.passed = time.monotonic(), clock.now()
        pause_s = UNREADABLE_S
        try:
            try:
                pause_s = kinds.settings_of(row).poll_s
                engine = contact.connect(row)
            except EngineUnavailable as error:  # it has no usable login
                contact.failed(row, str(error))
                return
            except (ValueError, OSError) as error:  # settings of another release, no CA file
                contact.failed(row, f"Its settings cannot be read: {error}")
                pause_s = UNREADABLE_S
                return
            if sync(row, engine, drained=self._drained, stopping=self._stopping.is_set):
                self._send_late(row)
        except (DatabaseError, InterfaceError):
            raise
        except Exception:
            log.exception("A pass over engine %s failed; it is repeated", row.name)
        finally:
            self.due = time.monotonic() + pause_s

    def _run(self) -> None:
        while not self._stopping.is_set():
            try:
                close_old_connections()
                self.turn()
            except (DatabaseError, InterfaceError) as error:
                log.warning("The database is unavailable, retrying: %s", error)
                connection.close()
            except Exception:
                log.exception("Engine %s could not be read; it is repeated", self._id)
            pause_s = LEAST_S if self._is_soon else self.due - time.monotonic()
            self._woken.wait(max(0.25, pause_s))
            self._woken.clear()
        contact.disconnect(self._id)
        self._late.close()
        connection.close()

    def _send_late(self, row: EngineRow) -> None:
        """A failure here says nothing about the engine. Raises errors of the database."""
        try:
            self._late.poll(row)
        except (DatabaseError, InterfaceError):
            raise
        except Exception:
            log.exception("What supervisors of %s left cannot be sent", row.name)
