"""`manage.py bundle`: writes the reproducibility bundle of a run, or submits one."""

from __future__ import annotations

import json
from argparse import ArgumentParser
from pathlib import Path
from typing import Any

from django.core.management.base import BaseCommand, CommandError

from orchestrator.common.errors import Refusal


class Command(BaseCommand):
    """The command `bundle`."""

    help = "Writes the reproducibility bundle of a run, or submits the run of one again."

    def add_arguments(self, parser: ArgumentParser) -> None:
        """Declare the options."""
        actions = parser.add_subparsers(dest="action", required=True)
        write = actions.add_parser("write", help="write the bundle of a run")
        write.add_argument("run", type=int)
        write.add_argument("file", type=Path)
        submit = actions.add_parser("submit", help="submit the run of a bundle")
        submit.add_argument("file", type=Path)
        submit.add_argument("--user", required=True, help="owner of the new run")
        submit.add_argument(
            "--other-versions", action="store_true", help="also a bundle of another release"
        )

    def handle(self, *args: Any, **options: Any) -> None:
        """Write or submit."""
        try:
            if options["action"] == "write":
                self._write(options["run"], options["file"])
            else:
                self._submit(options["file"], options["user"], options["other_versions"])
        except Refusal as refusal:
            hints = [item["hint"] for item in refusal.errors if item.get("hint")]
            raise CommandError(" ".join([refusal.detail, *hints])) from None
        except (OSError, ValueError) as error:
            raise CommandError(f"{options['file']}: {error}") from None

    def _write(self, id: int, file: Path) -> None:
        from orchestrator.runs import bundles
        from orchestrator.runs.models import Run

        run = Run.objects.filter(pk=id).first()
        if run is None:
            raise CommandError(f"There is no run {id}.")
        file.write_text(json.dumps(bundles.bundle_of(run), indent=1))
        self.stdout.write(f"{file} repeats run {id}.")

    def _submit(self, file: Path, username: str, other_versions: bool) -> None:
        from orchestrator.accounts.models import User
        from orchestrator.runs import bundles

        owner = User.objects.filter(username=username).first()
        if owner is None:
            raise CommandError(f"There is no user {username}.")
        document = json.loads(file.read_text())
        run = bundles.bundle_submit(owner=owner, bundle=document, other_versions=other_versions)
        self.stdout.write(f"Run {run.pk} {run.name} is queued.")
