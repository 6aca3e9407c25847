"""`manage.py planner_accuracy`: writes the table that compares predictions with runs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from django.core.management.base import BaseCommand, CommandError, CommandParser

from orchestrator.planner.accuracy.report import report
from orchestrator.planner.request_files import UnusableInput, write_text

BEGIN, END = "<!-- measured: begin -->", "<!-- measured: end -->"


class Command(BaseCommand):
    """Writes the accuracy table of docs/planner-accuracy.md."""

    help = (
        "Regenerates the table of docs/planner-accuracy.md from a folder of measurement files "
        "(JSON lines)."
    )
    requires_system_checks: list[str] = []

    def add_arguments(self, parser: CommandParser) -> None:
        """Declares the measurement folder and the output file."""
        parser.add_argument(
            "--measurements",
            required=True,
            metavar="DIR",
            help="holds vtrain.jsonl, mosaic.jsonl, …",
        )
        parser.add_argument("--out", default="docs/planner-accuracy.md", metavar="FILE.md")

    def handle(self, *args: Any, **options: Any) -> None:
        """Writes the table; exit code 2 for unusable input."""
        out = Path(options["out"])
        try:
            rows, table = report(options["measurements"])
            before = (
                out.read_text(encoding="utf-8") if out.exists() else "# Accuracy of the planner\n"
            )
            write_text(str(out), insert_table(before, table))
        except (OSError, ValueError) as error:  # includes UnusableInput
            raise CommandError(str(error), returncode=2) from None
        passed = [row.passed for row in rows if row.passed is not None]
        self.stdout.write(f"{sum(passed)} of {len(passed)} targets are met; {out} lists them.")


def insert_table(text: str, table: str) -> str:
    """The text with the table between its two marks; appends them if both are missing.

    Raises UnusableInput if only one mark is present.
    """
    if (BEGIN in text) != (END in text):
        raise UnusableInput(
            f"one of the marks {BEGIN} and {END} is missing; put it back, or remove the other"
        )
    if BEGIN not in text:
        return f"{text.rstrip()}\n\n{BEGIN}\n{table}{END}\n"
    head, _, rest = text.partition(BEGIN)
    return f"{head}{BEGIN}\n{table}{END}{rest.partition(END)[2]}"
