"""`manage.py ingest`: points, events and logs from Redis into the database, until INT or TERM."""

from __future__ import annotations

import logging
import signal
import threading
from typing import Any

from django.core.management.base import BaseCommand

from orchestrator.telemetry.ingest import Ingest
from orchestrator.telemetry.retention import keep_house

log = logging.getLogger(__name__)


class Command(BaseCommand):
    help = (
        "Reads telemetry from Redis into the database. Several may run; each entry is stored once."
    )
    requires_system_checks: list[str] = []  # `manage.py check` is for that; a start loads no pages

    def handle(self, *args: Any, **options: Any) -> None:
        stop = threading.Event()
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, lambda *_: stop.set())
        ingest = Ingest(stop=stop)
        log.info("ingest %s reads", ingest.name)
        house = threading.Thread(target=keep_house, args=(stop,), name="retention")
        house.start()
        try:
            ingest.run()
        finally:
            stop.set()
            house.join()
        log.info("ingest %s stops after %d ticks", ingest.name, ingest.ticks)
