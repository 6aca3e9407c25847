"""`manage.py planner_accuracy`: writes the table that compares predictions with runs."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

from django.core.management.base import BaseCommand, CommandError, CommandParser

from orchestrator.planner.accuracy.left_out_sources import leave_sources_out, read_sources
from orchestrator.planner.accuracy.prior_module import write_prior_module
from orchestrator.planner.accuracy.report import report, sources_table
from orchestrator.planner.request_files import UnusableInput, write_text

BEGIN, END = "<!-- measured: begin -->", "<!-- measured: end -->"
SOURCES_BEGIN, SOURCES_END = "<!-- sources: begin -->", "<!-- sources: end -->"


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
        parser.add_argument(
            "--leave-one-source-out",
            action="store_true",
            help="predicts each source from all others instead, and writes that table",
        )
        parser.add_argument(
            "--write-priors",
            action="store_true",
            help="fits the priors of unmeasured pairs to all sources: model/prior_values.py",
        )
        parser.add_argument("--json", action="store_true", help="prints the rows as JSON too")
        parser.add_argument("--out", default="docs/planner-accuracy.md", metavar="FILE.md")

    def handle(self, *args: Any, **options: Any) -> None:
        """Writes the table; exit code 2 for unusable input."""
        out = Path(options["out"])
        if options["write_priors"] or options["leave_one_source_out"]:
            self._sources(out, options)
            return
        try:
            rows, table = report(options["measurements"])
            before = (
                out.read_text(encoding="utf-8") if out.exists() else "# Accuracy of the planner\n"
            )
            write_text(str(out), insert_table(before, table))
        except (OSError, ValueError) as error:  # includes UnusableInput
            raise CommandError(str(error), returncode=2) from None
        if options["json"]:
            self.stdout.write(json.dumps([asdict(row) for row in rows]))
        passed = [row.passed for row in rows if row.passed is not None]
        self.stdout.write(f"{sum(passed)} of {len(passed)} targets are met; {out} lists them.")

    def _sources(self, out: Path, options: dict[str, Any]) -> None:
        """Leave-one-source-out, and the priors of pairs without runs."""
        try:
            sources = read_sources(Path(options["measurements"]))
            if len(sources) < 3:
                raise UnusableInput(
                    f"{options['measurements']} has {len(sources)} sources; at least 3 are needed"
                )
            if options["write_priors"]:
                self.stdout.write(f"Written to {write_prior_module(sources)}.")
            if not options["leave_one_source_out"]:
                return
            rows = leave_sources_out(sources)
            before = (
                out.read_text(encoding="utf-8") if out.exists() else "# Accuracy of the planner\n"
            )
            write_text(
                str(out), insert_table(before, sources_table(rows), SOURCES_BEGIN, SOURCES_END)
            )
        except (OSError, ValueError) as error:
            raise CommandError(str(error), returncode=2) from None
        if options["json"]:
            self.stdout.write(json.dumps([asdict(row) for row in rows]))
        mean = sum(row.error for row in rows) / len(rows)
        worst = max(rows, key=lambda row: row.error)
        self.stdout.write(
            f"Each source predicted from the others: {mean:.1f}% on average, {worst.error:.1f}% "
            f"the worst ({worst.source}); {out} lists them."
        )


def insert_table(text: str, table: str, begin: str = BEGIN, end: str = END) -> str:
    """The text with the table between its two marks; appends them if both are missing.

    Raises UnusableInput if only one mark is present.
    """
    if (begin in text) != (end in text):
        raise UnusableInput(
            f"one of the marks {begin} and {end} is missing; put it back, or remove the other"
        )
    if begin not in text:
        return f"{text.rstrip()}\n\n{begin}\n{table}{end}\n"
    head, _, rest = text.partition(begin)
    return f"{head}{begin}\n{table}{end}{rest.partition(end)[2]}"
