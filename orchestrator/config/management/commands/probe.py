"""`manage.py probe`: measures this machine for the planner and stores the result for its node."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from typing import Any

from django.conf import settings
from django.core.management.base import BaseCommand, CommandError, CommandParser
from django.db import DatabaseError, InterfaceError

from orchestrator.fleet.models import Node
from orchestrator.planner.store import node_probes
from orchestrator.runs import selectors as runs
from workers.contracts.wire.maintenance.node_probe import FULL_S, MOST_S, NodeProbeReport

_LATE_S = 60.0


class Command(BaseCommand):
    """Measures compute, memory and collectives of this machine; refuses a busy one."""

    help = __doc__

    def add_arguments(self, parser: CommandParser) -> None:
        """Options."""
        parser.add_argument(
            "--seconds", type=float, default=FULL_S, help=f"time to measure (default {FULL_S:.0f})"
        )
        parser.add_argument("--short", action="store_true", help="leave out the larger shapes")
        parser.add_argument("--node", help="name of this machine's node (default: the host name)")
        parser.add_argument(
            "--ranks", type=int, help="processes (default: GPUs, or cores up to the CPU slots)"
        )
        parser.add_argument(
            "--force", action="store_true", help="measure a busy machine; its numbers count less"
        )
        parser.add_argument("--json", action="store_true", help="print one JSON document")

    def handle(self, *args: Any, **options: Any) -> None:
        """Raises CommandError for a busy machine and for options that are not valid."""
        if not 1 <= options["seconds"] <= MOST_S:
            raise CommandError(f"--seconds: {options['seconds']:g} is not from 1 to {MOST_S:.0f}")
        node = _node(options["node"])
        if (
            node is not None
            and not options["force"]
            and (active := runs.attempts_on(node=node.name))
        ):
            named = ", ".join(f"run {attempt.run_id}" for attempt in active[:5])
            raise CommandError(
                f"{node.name} is busy: {named} hold devices. Wait until they end, or use --force."
            )
        report = measure(
            device=_device(node),
            ranks=options["ranks"] or ranks_of(node),
            seconds=options["seconds"],
            short=options["short"],
            force=options["force"],
        )
        stored = node is not None
        if node is not None:
            node_probes.probe_record(node=node, report=report)
        if options["json"]:
            self.stdout.write(json.dumps({"stored": stored, **report.to_dict()}))
            return
        for rate in report.rates:
            self.stdout.write(
                f"{rate.measure:<15} {_value(rate.value, rate.unit):>16}  {rate.setting}"
            )
        for step in report.steps:
            model = step.model
            self.stdout.write(
                f"{'step':<15} {1e3 * step.step_time_s:>13.1f} ms  {model['layers']} layers of "
                f"{model['hidden']}, {step.seq_len} tokens"
            )
        for problem in report.problems:
            self.stdout.write(f"problem: {problem}")
        where = (
            f"for node {node.name}" if node is not None else "nowhere: this machine is not a node"
        )
        self.stdout.write(
            f"{report.seconds:.0f} s, {report.ranks} ranks, {report.load:.0%} of the cores in use "
            f"before; stored {where}"
        )


def measure(
    *, device: str, ranks: int, seconds: float, short: bool, force: bool
) -> NodeProbeReport:
    """Run `python -m workers.probe`, because the control plane does not load torch.

    Raises CommandError with its reason.
    """
    command = [sys.executable, "-m", "workers.probe", "--ranks", str(ranks), "--device", device]
    command += ["--seconds", str(seconds)]
    command += [*(["--short"] if short else []), *(["--force"] if force else [])]
    try:
        done = subprocess.run(
            command,
            cwd=settings.BASE_DIR,
            capture_output=True,
            text=True,
            timeout=seconds + _LATE_S,
            check=False,
        )
        document = json.loads(done.stdout.strip().splitlines()[-1])
    except (subprocess.TimeoutExpired, ValueError, IndexError) as error:
        raise CommandError(f"The probe failed: {type(error).__name__}.") from None
    if "problem" in document:
        raise CommandError(f"Not probed: {document['problem']}.")
    return NodeProbeReport.from_dict(document)


def ranks_of(node: Node | None) -> int:
    """One process per device; CPU slots beyond the cores would only share them."""
    cores = os.cpu_count() or 1
    if node is None:
        return cores if cores < 8 else 8
    devices = list(node.devices.all())
    return len(devices) if devices and devices[0].kind == "gpu" else min(cores, len(devices) or 1)


def _node(name: str | None) -> Node | None:
    """This machine's node. Raises CommandError for an unknown name; None without a database."""
    try:
        row = Node.objects.filter(name=name or socket.gethostname().split(".")[0]).first()
    except (DatabaseError, InterfaceError):
        row = None
    if name and row is None:
        raise CommandError(f"No node is named {name!r}; the page Fleet lists them.")
    return row


def _device(node: Node | None) -> str:
    device = None if node is None else node.devices.first()
    return (device.catalogue if device is not None else "") or "cpu"


def _value(value: float, unit: str) -> str:
    if unit == "s":
        return f"{1e6 * value:,.2f} us"
    return f"{value / 1e9:,.2f} G{unit}"
