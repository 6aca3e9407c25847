"""`manage.py up`: starts embedded mode."""

from __future__ import annotations

import sys
from argparse import ArgumentParser
from typing import Any

from django.core.management.base import BaseCommand

from orchestrator.config.embedded.options import add_options


class Command(BaseCommand):
    """The command `up`."""

    help = "Starts all of Orrery on this machine, in the foreground, until Ctrl-C."
    requires_system_checks: list[str] = []

    def add_arguments(self, parser: ArgumentParser) -> None:
        """Declare the options."""
        add_options(parser)

    def handle(self, *args: Any, **options: Any) -> None:
        """Run until a signal, then exit."""
        from orchestrator.config.embedded.up import up

        sys.exit(up(devices=options["devices"]))
