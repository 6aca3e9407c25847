"""`manage.py restore FILE`: replaces database, secret key and, on request, objects."""

from __future__ import annotations

import time
from argparse import ArgumentParser
from pathlib import Path
from typing import Any

from django.conf import settings
from django.core.management.base import BaseCommand, CommandError


class Command(BaseCommand):
    """The command `restore`."""

    help = "Replaces the data of this installation by a backup. Stop every process of it first."

    def add_arguments(self, parser: ArgumentParser) -> None:
        """Declare the options."""
        parser.add_argument("file", type=Path, help="a file that `backup` wrote")
        parser.add_argument("--artifacts", action="store_true", help="also write objects back")

    def handle(self, *args: Any, **options: Any) -> None:
        """Restore the file and say from when it is."""
        from orchestrator.config.backup import archive
        from orchestrator.config.embedded import lock

        started = time.perf_counter()
        source: Path = options["file"].absolute()
        try:
            held = lock.acquire(settings.ENV.home, "a restore")
        except lock.AlreadyRunning as error:
            raise CommandError(str(error)) from None
        try:
            about = archive.read(source, artifacts=options["artifacts"])
        except (archive.BackupRefused, OSError, ValueError) as error:
            raise CommandError(str(error)) from None
        finally:
            held.close()
        self.stdout.write(
            f"Restored the state of {about['created']} (release {about['release']}) in "
            f"{time.perf_counter() - started:.1f} s. Start the installation again."
        )
