"""`manage.py scheduler`: the control plane's loop, in the foreground.

A second one waits until the first is gone.
"""

from __future__ import annotations

import signal
from typing import Any

from django.core.management.base import BaseCommand

from orchestrator.scheduling.loop import Loop


class Command(BaseCommand):
    help = (
        "Reads nodes' reports, places waiting runs, sends orders, looks after silent nodes. "
        "SIGTERM stops it promptly."
    )
    requires_system_checks: list[str] = []  # `manage.py check` is for that; a start loads no pages

    def handle(self, *args: Any, **options: Any) -> None:
        loop = Loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda sent, frame: loop.stop())
        loop.run()
