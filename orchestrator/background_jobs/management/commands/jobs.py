"""`manage.py jobs`: runs periodic and slow work until SIGINT or SIGTERM."""

from __future__ import annotations

import logging
from typing import Any

from django.core.management.base import BaseCommand

from orchestrator.background_jobs import worker
from orchestrator.common.processes.garbage_collection import exclude_loaded_objects


class Command(BaseCommand):
    """Runs the Celery worker with its beat."""

    help = "Runs retention, notifications and other periodic work. Several may run."
    requires_system_checks: list[str] = []  # `manage.py check` runs them; this starts faster

    def handle(self, *args: Any, **options: Any) -> None:
        """Run until a signal arrives."""
        for name in ("celery", "kombu"):
            logging.getLogger(name).setLevel(logging.WARNING)
        exclude_loaded_objects()
        worker.run()
