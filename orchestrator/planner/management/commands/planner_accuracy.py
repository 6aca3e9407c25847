"""`manage.py planner_accuracy`: holds predictions against files of measured runs and writes the
report's table.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from django.core.management.base import BaseCommand, CommandError, CommandParser

from orchestrator.planner.accuracy.report import report
from orchestrator.planner.request_files import Unusable, write

BEGIN, END = "<!-- measured: begin -->", "<!-- measured: end -->"


class Command(BaseCommand):
    help = (
        "Regenerates the table of docs/planner-accuracy.md from a folder of measurement files "
        "(JSON lines)."
    )
    requires_system_checks: list[str] = []

    def add_arguments(self, parser: CommandParser) -> None:
        parser.add_argument(
            "--measurements",
            required=True,
            metavar="DIR",
            help="holds vtrain.jsonl, mosaic.jsonl, …",
        )
        parser.add_argument("--out", default="docs/planner-accuracy.md", metavar="FILE.md")

    def handle(self, *args: Any, **options: Any) -> None:
        out = Path(options["out"])
        try:
            rows, table = report(options["measurements"])
            before = (
                out.read_text(encoding="utf-8") if out.exists() else "# How right the planner is\n"
            )
            write(str(out), placed(before, table))
        except (OSError, ValueError) as error:  # Unusable is one
            raise CommandError(str(error), returncode=2) from None
        told = [row.passed for row in rows if row.passed is not None]
        self.stdout.write(f"{sum(told)} of {len(told)} figures are reached; {out} has them all.")


def placed(text: str, table: str) -> str:
    """The text with the table between its two marks, which are put at its end where they are
    missing.

    Raises Unusable where only one of them is there.
    """
    if (BEGIN in text) != (END in text):
        raise Unusable(
            f"one of the marks {BEGIN} and {END} is missing; put it back, or remove the other"
        )
    if BEGIN not in text:
        return f"{text.rstrip()}\n\n{BEGIN}\n{table}{END}\n"
    head, _, rest = text.partition(BEGIN)
    return f"{head}{BEGIN}\n{table}{END}{rest.partition(END)[2]}"
