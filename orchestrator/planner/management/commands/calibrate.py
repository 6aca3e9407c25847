"""`manage.py calibrate`: fits the planner's physical parameters to measured runs.

Needs neither database nor Redis.
"""

from __future__ import annotations

import json
from typing import Any

from django.core.management.base import BaseCommand, CommandError, CommandParser

from orchestrator.planner import api
from orchestrator.planner.calibration.fit import fit
from orchestrator.planner.calibration.measurements import usable
from orchestrator.planner.request_files import Unusable, lines_of, write
from orchestrator.planner.requests import Choices


class Command(BaseCommand):
    help = "Fits the planner to measured runs: request lines with `measured`, one a line."
    requires_system_checks: list[str] = []

    def add_arguments(self, parser: CommandParser) -> None:
        parser.add_argument("--measurements", required=True, metavar="FILE.jsonl")
        parser.add_argument("--out", required=True, metavar="CALIBRATION.json")

    def handle(self, *args: Any, **options: Any) -> None:
        try:
            self._fit(options["measurements"], options["out"])
        except Unusable as error:
            raise CommandError(str(error), returncode=2) from None

    def _fit(self, measurements: str, out: str) -> None:
        read = [api.read_one(line, Choices(files=True)) for line in lines_of(measurements)]
        rows = [
            (each.request, each.measured)
            for each in read
            if each.request is not None and _says(each.measured)
        ]
        for place, each in enumerate(read, 1):
            if each.problems:
                self.stderr.write(
                    f"line {place} is left out: {'; '.join(str(item) for item in each.problems)}"
                )
            elif not _says(each.measured):
                self.stderr.write(f"line {place} is left out: nothing is measured in it")
        if not rows:
            raise Unusable(
                f"{measurements} has no line with a legal plan and something measured; give "
                "request lines with "
                "`measured`: step_time_s, tokens_per_s_per_device, tflops_per_device, peak_bytes "
                "or out_of_memory"
            )
        calibration = fit(rows)
        write(out, json.dumps(calibration.to_dict(), indent=1) + "\n")
        self.stdout.write(f"Fitted to {len(rows)} of {len(read)} measurements; written to {out}.")


def _says(measured: dict[str, Any]) -> bool:
    return bool(usable(measured)) or measured.get("out_of_memory") is True
