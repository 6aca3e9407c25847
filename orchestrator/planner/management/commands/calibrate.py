"""`manage.py calibrate`: fits the planner's physical parameters to measured runs.

Does not need a database or Redis.
"""

from __future__ import annotations

import json
from typing import Any

from django.core.management.base import BaseCommand, CommandError, CommandParser

from orchestrator.planner import api
from orchestrator.planner.calibration.fit import fit
from orchestrator.planner.calibration.measurements import is_usable
from orchestrator.planner.plan_request import ParseOptions
from orchestrator.planner.request_files import UnusableInput, read_json_lines, write_text


class Command(BaseCommand):
    """Fits a calibration to a file of measurement lines."""

    help = "Fits the planner to measured runs: request lines with `measured`, one per line."
    requires_system_checks: list[str] = []

    def add_arguments(self, parser: CommandParser) -> None:
        """Declares the input and output files."""
        parser.add_argument("--measurements", required=True, metavar="FILE.jsonl")
        parser.add_argument("--out", required=True, metavar="CALIBRATION.json")

    def handle(self, *args: Any, **options: Any) -> None:
        """Fits and writes the calibration; exit code 2 for unusable input."""
        try:
            self._fit(options["measurements"], options["out"])
        except UnusableInput as error:
            raise CommandError(str(error), returncode=2) from None

    def _fit(self, measurements: str, out: str) -> None:
        lines = [
            api.parse_line(line, ParseOptions(files=True)) for line in read_json_lines(measurements)
        ]
        rows = [
            (line.request, line.measured)
            for line in lines
            if line.request is not None and is_usable(line.measured)
        ]
        for number, line in enumerate(lines, 1):
            if line.problems:
                reason = "; ".join(str(item) for item in line.problems)
                self.stderr.write(f"line {number} is skipped: {reason}")
            elif not is_usable(line.measured):
                self.stderr.write(f"line {number} is skipped: it has no measured value")
        if not rows:
            raise UnusableInput(
                f"{measurements} has no line with a legal plan and a measured value; give request "
                "lines with `measured`: step_time_s, tokens_per_s_per_device, tflops_per_device, "
                "peak_bytes or out_of_memory"
            )
        calibration = fit(rows)
        for doubt in calibration.doubtful:
            run = doubt["id"] or f"number {doubt['line']}"
            self.stderr.write(f"run {run} is doubtful: {doubt['message']}")
        write_text(out, json.dumps(calibration.to_dict(), indent=1) + "\n")
        self.stdout.write(f"Fitted to {len(rows)} of {len(lines)} measurements; written to {out}.")
