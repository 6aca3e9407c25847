"""`manage.py ingest`: stores points, events and logs from Redis until SIGINT or SIGTERM."""

from __future__ import annotations

import logging
import signal
import threading
from typing import Any

from django.core.management.base import BaseCommand

from orchestrator.common.processes.garbage_collection import exclude_loaded_objects
from orchestrator.telemetry.ingest import Ingest

log = logging.getLogger(__name__)


class Command(BaseCommand):
    """Runs the ingest loop."""

    help = (
        "Reads telemetry from Redis into the database. Several may run; each entry is stored once."
    )
    requires_system_checks: list[str] = []  # `manage.py check` runs them; this starts faster

    def handle(self, *args: Any, **options: Any) -> None:
        """Run until a signal arrives."""
        exclude_loaded_objects()
        stop = threading.Event()
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, lambda *_: stop.set())
        ingest = Ingest(stop=stop)
        log.info("Ingest %s started", ingest.name)
        ingest.run()
        log.info("Ingest %s stopped after %d ticks", ingest.name, ingest.ticks)
