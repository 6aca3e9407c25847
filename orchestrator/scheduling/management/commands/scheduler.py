"""`manage.py scheduler`: runs the scheduler's loop; a second one waits until the first ends."""

from __future__ import annotations

import signal
from typing import Any

from django.core.management.base import BaseCommand

from orchestrator.common.processes.garbage_collection import exclude_loaded_objects
from orchestrator.scheduling.loop import Loop


class Command(BaseCommand):
    """Runs the scheduler in the foreground."""

    help = (
        "Reads nodes' reports, places waiting runs, sends orders, handles silent nodes. "
        "SIGTERM stops it promptly."
    )
    requires_system_checks: list[str] = []  # `manage.py check` runs them; this starts faster

    def handle(self, *args: Any, **options: Any) -> None:
        """Run until SIGTERM or SIGINT."""
        exclude_loaded_objects()
        loop = Loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda sent, frame: loop.stop())
        loop.run()
