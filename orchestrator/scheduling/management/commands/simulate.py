"""`manage.py simulate`: compare scheduling policies on a trace. Needs no database and no Redis."""

from __future__ import annotations

import json
from argparse import ArgumentParser
from pathlib import Path
from typing import Any

from django.core.management.base import BaseCommand, CommandError

from orchestrator.scheduling.ordering.orders import ORDERS
from orchestrator.scheduling.simulation import compare, traces

_FIGURES = (
    ("mean wait", "mean_wait_s", "{:,.0f} s"),
    ("p95 wait", "p95_wait_s", "{:,.0f} s"),
    ("mean completion", "mean_completion_s", "{:,.0f} s"),
    ("utilization", "utilization", "{:.1%}"),
    ("fragmentation", "fragmentation", "{:.2%}"),
    ("fairness", "fairness", "{:.4f}"),
    ("starved", "starved", "{:,}"),
    ("lost", "lost_device_h", "{:,.1f} h"),
)


class Command(BaseCommand):
    """Simulate policies on a trace."""

    help = (
        "Runs scheduling policies on a trace of runs and compares waiting, completion, "
        "utilization, fragmentation and fairness."
    )
    requires_system_checks: list[str] = []

    def add_arguments(self, parser: ArgumentParser) -> None:
        """Declare the command line."""
        parser.add_argument(
            "--trace",
            required=True,
            help="a CSV file with the columns "
            + ", ".join(traces.COLUMNS)
            + "; or philly:RUNS:SEED or helios:RUNS:SEED for a synthetic one",
        )
        parser.add_argument("--nodes", type=int, required=True)
        parser.add_argument("--devices-per-node", type=int, required=True)
        parser.add_argument(
            "--policy", default="fifo,orrery", help=f"one or more of {', '.join(ORDERS)}"
        )
        parser.add_argument("--json", action="store_true", help="print one JSON document")

    def handle(self, *args: Any, **options: Any) -> None:
        """Run and print."""
        policies = compare.parse_policies(options["policy"])
        setup = compare.Setup(options["nodes"], options["devices_per_node"], policies)
        if problem := setup.problem():
            raise CommandError(f"{problem[0].upper()}{problem[1:]}.")
        try:
            result = compare.compare(_read(options["trace"], setup.devices), setup)
        except traces.TraceError as error:
            raise CommandError(str(error)) from None
        if options["json"]:
            self.stdout.write(json.dumps(result))
            return
        self.stdout.write(f"{result['runs']:,} runs, simulated in {result['seconds']:.1f} s")
        width = max(len(name) for name in policies) + 2
        titles = "".join(f"{title:>17}" for title, _, _ in _FIGURES)
        self.stdout.write(f"{'policy':{width}}{titles}")
        for name, figures in result["policies"].items():
            values = "".join(f"{form.format(figures.get(key, 0)):>17}" for _, key, form in _FIGURES)
            self.stdout.write(f"{name:{width}}{values}")


def _read(text: str, devices: int) -> traces.Trace:
    trace = compare.synthetic_trace(text, devices=devices)
    if trace is not None:
        return trace
    path = Path(text)
    try:
        with path.open(encoding="utf-8", newline="") as file:
            return traces.read_csv(
                file, name=path.name, devices=devices, most_runs=compare.MOST_RUNS
            )
    except UnicodeDecodeError:
        raise traces.TraceError(f"{path.name} is not a CSV file in UTF-8.") from None
    except OSError as error:
        raise CommandError(
            f"Cannot read {text}: {error.strerror}. Give a CSV file, philly:RUNS:SEED or "
            "helios:RUNS:SEED."
        ) from None
