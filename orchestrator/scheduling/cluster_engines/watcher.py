"""A thread of the scheduler that starts and wakes one thread per engine."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

from django.db import DatabaseError, InterfaceError, close_old_connections, connection

from orchestrator.common import clock
from orchestrator.fleet import broker_users
from orchestrator.fleet.cluster_engines import members
from orchestrator.fleet.models import Engine as EngineRow
from orchestrator.scheduling.cluster_engines import requests
from orchestrator.scheduling.cluster_engines.enqueue import engines_with_new_runs
from orchestrator.scheduling.cluster_engines.turns import EngineTurns

log = logging.getLogger(__name__)
_IDLE_S = 1.0  # between two readings which engines exist
_EXPIRE_EVERY_S = 600.0
_END_S = 5.0


class Watcher:
    """Runs while this process holds the scheduler's lease; `drained` as in `sync`."""

    def __init__(self, drained: Callable[[], bool]) -> None:
        self._drained = drained
        self._stopping = threading.Event()
        self._woken = threading.Event()
        self._turns: dict[int, EngineTurns] = {}
        self._expire_due = time.monotonic() + _EXPIRE_EVERY_S
        self._thread = threading.Thread(target=self._run, name="engines", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def wake(self) -> None:
        """Pass soon over engines with new runs, or with jobs of runs that were stopped."""
        self._woken.set()

    def close(self) -> None:
        """Stop, and wait 5 s at most for the current passes, which end by themselves later."""
        self._stopping.set()
        self._woken.set()
        end = time.monotonic() + _END_S
        self._thread.join(_END_S)
        for turns in list(self._turns.values()):
            turns.stop()
        for id, turns in list(self._turns.items()):
            if not turns.join(max(0.0, end - time.monotonic())):
                log.warning("Engine %s does not answer; its pass ends after its time limit", id)

    def _run(self) -> None:
        while not self._stopping.is_set():
            try:
                close_old_connections()
                self._expire()
                self._tend()
            except (DatabaseError, InterfaceError) as error:
                log.warning("The database is unavailable, retrying: %s", error)
                connection.close()
            except Exception:
                log.exception("The engines could not be read; it is repeated")
            self._woken.wait(_IDLE_S)
        connection.close()

    def _expire(self) -> None:
        now = time.monotonic()
        if now >= self._expire_due:
            self._expire_due = now + _EXPIRE_EVERY_S
            for name in members.members_expire(now=clock.now()):
                broker_users.remove_node(name)

    def _tend(self) -> None:
        """Start threads of new engines, stop those of removed ones, wake those with new work."""
        rows = set(EngineRow.objects.values_list("pk", flat=True))
        for id in self._turns.keys() - rows:
            self._turns.pop(id).stop()
        for id in sorted(rows - self._turns.keys()):
            self._turns[id] = EngineTurns(id, self._drained)
            self._turns[id].start()
        if self._woken.is_set():
            self._woken.clear()
            since = {id: one.passed for id, one in self._turns.items() if one.passed is not None}
            stopped = set(requests.unwanted_jobs().values_list("engine_id", flat=True))
            for id in engines_with_new_runs(since) | (stopped & since.keys()):
                self._turns[id].wake()
