"""`manage.py backup FILE`: writes database, secret key and, on request, objects into one file."""

from __future__ import annotations

import time
from argparse import ArgumentParser
from pathlib import Path
from typing import Any

from django.core.management.base import BaseCommand, CommandError


class Command(BaseCommand):
    """The command `backup`."""

    help = "Writes a backup of this installation while it runs."

    def add_arguments(self, parser: ArgumentParser) -> None:
        """Declare the options."""
        parser.add_argument("file", type=Path, help="where to write it; holds secrets, mode 600")
        parser.add_argument(
            "--artifacts",
            action="store_true",
            help="also the copies in the store, or the run folders of this machine",
        )

    def handle(self, *args: Any, **options: Any) -> None:
        """Write the file and say how large it is."""
        from orchestrator.config.backup import archive

        started = time.perf_counter()
        target: Path = options["file"].absolute()
        try:
            about = archive.write(target, artifacts=options["artifacts"])
        except (archive.BackupRefused, OSError) as error:
            raise CommandError(str(error)) from None
        seconds = time.perf_counter() - started
        objects = f", {about['objects']:,} objects" if options["artifacts"] else ""
        size = target.stat().st_size / 1e6
        self.stdout.write(
            f"{target}: {size:,.1f} MB of {about['database']}{objects} in {seconds:.1f} s."
        )
