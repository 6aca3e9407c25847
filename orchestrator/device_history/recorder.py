"""The recorder of a scheduler process: gathers heartbeats and writes each minute in a thread."""

from __future__ import annotations

import logging
import threading
from typing import Final

from django.db import DatabaseError, IntegrityError, InterfaceError, connection

from orchestrator.common import clock
from orchestrator.device_history.gathering import Gathering
from orchestrator.device_history.writing import Holders, Writer

log = logging.getLogger(__name__)

_CHECK_S: Final = 5.0

# heartbeats of this process; only the scheduler with the lease reads any
gathering: Final = Gathering()


class Recorder:
    """Writes the gathered minutes until `close`; `held` reads which attempts held devices."""

    def __init__(self, held: Holders) -> None:
        self._held = held
        self._writer = Writer()
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="device-history", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def close(self) -> None:
        """Stop, and wait until the thread has ended; the minute that has begun is not written."""
        self._closing.set()
        if self._thread.is_alive():
            self._thread.join()

    def write_due(self) -> int:
        """Write the minutes that have ended; returns their number."""
        written = 0
        for minute in gathering.due(clock.now().timestamp()):
            points = gathering.take(minute)
            try:
                written += self._writer.write(minute, points, self._held)
            except IntegrityError as error:  # a node or attempt was deleted meanwhile
                log.warning("The readings of a minute are lost: %s", error)
                self._writer = Writer()
        return written

    def _run(self) -> None:
        try:
            while not self._closing.wait(_CHECK_S):
                try:
                    self.write_due()
                except (DatabaseError, InterfaceError) as error:
                    log.warning("The readings of a minute are lost: %s", error)
                    self._writer = Writer()
                    connection.close()
                except Exception:
                    log.exception("The readings of a minute are lost")
                    self._writer = Writer()
        finally:
            connection.close()
