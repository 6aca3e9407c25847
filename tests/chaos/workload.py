"""Submits small runs so that the cluster is always busy, cancels some, and waits for their end.

Uses the product's services in this process; needs `django.setup()` first.
"""

from __future__ import annotations

import random
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from django.core.management import call_command
from django.db import OperationalError, close_old_connections

from orchestrator.accounts.models import User
from orchestrator.accounts.roles import Role
from orchestrator.fleet.cordoning import node_uncordon
from orchestrator.fleet.models import Node
from orchestrator.fleet.services import join_token_create
from orchestrator.runs import services as runs
from orchestrator.runs.models import Run
from orchestrator.runs.states import ENDED
from tests.chaos.cluster import wait_until
from tests.chaos.invariants import Evidence, every_point_once

CANCELLED_SHARE = 0.1
LONG_SHARE = 0.3  # of the runs, which outlast most faults
LONG_STEPS = 600


class Workload:
    """Runs of one user; `cancelled` holds those that were cancelled on request."""

    def __init__(self, chance: random.Random, *, devices: int, steps: int) -> None:
        call_command("migrate", verbosity=0, interactive=False)
        self._owner = User.objects.create_user("chaos", password=None, role=Role.ADMIN)
        self._chance, self._devices, self._steps = chance, devices, steps
        self._due = 0.0
        self._number = 0
        self.cancelled: set[int] = set()
        self.cordons = 0  # lifted ones

    def join_token(self) -> str:
        """A token for one node."""
        return join_token_create(by=None)

    def wait_for_nodes(self, count: int) -> None:
        """Wait until all nodes have joined."""
        wait_until(lambda: Node.objects.count() == count, 120, "all nodes joined")

    def keep_busy(self) -> None:
        """Once per second: submit runs while few wait, and cancel one now and again."""
        if time.monotonic() < self._due:
            return
        self._due = time.monotonic() + 1.0
        close_old_connections()
        try:
            alive = list(Run.objects.exclude(state__in=ENDED))
            for _ in range(max(0, self._devices - len(alive))):
                self._submit()
            if alive and self._chance.random() < CANCELLED_SHARE:
                run = self._chance.choice(alive)
                self.cancelled.add(run.pk)
                runs.run_cancel(run=run, by=self._owner)
        except OperationalError:
            return  # a suspended scheduler may hold the database's lock

    def lift_cordons(self) -> None:
        """Lift the cordons that failures in a row caused, as an operator does after a repair."""
        close_old_connections()
        try:
            for node in Node.objects.filter(cordons__lifted=None, cordons__isnull=False).distinct():
                node_uncordon(node=node, by=self._owner)
                self.cordons += 1
        except OperationalError:
            return  # the next call

    def wait_for_end(self, seconds: float, *, heal: Callable[[], None]) -> None:
        """Wait until every run has ended, at most this long."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            close_old_connections()
            if not Run.objects.exclude(state__in=ENDED).exists():
                return
            heal()
            self.lift_cordons()
            time.sleep(0.5)

    def wait_for_telemetry(self, evidence: Evidence, seconds: float) -> None:
        """Wait until every point is stored, at most this long."""
        self.wait_for_telemetry_in(evidence.nodes_home, seconds)

    def wait_for_telemetry_in(self, nodes_home: Path, seconds: float) -> None:
        """`wait_for_telemetry` for the run directories in a folder."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline and every_point_once(nodes_home):
            time.sleep(0.5)

    def submit(self, count: int, *, steps: int) -> list[Run]:
        """Submit runs on one device each."""
        runs_ = []
        for _ in range(count):
            self._number += 1
            spec = self._spec(1)
            spec["train"]["steps"] = steps
            name = f"chaos-{self._number}"
            runs_.append(runs.run_submit(owner=self._owner, name=name, spec=spec, force=True))
        return runs_

    def summary(self) -> str:
        """Runs by state and the number of attempts."""
        close_old_connections()
        states = Counter(Run.objects.values_list("state", flat=True))
        attempts = sum(Run.objects.values_list("attempt_number", flat=True))
        listed = ", ".join(f"{count} {state}" for state, count in sorted(states.items()))
        return f"{listed}, {attempts} attempts, {self.cordons} cordons lifted"

    def _submit(self) -> None:
        ranks = self._chance.choice([1, 1, 2, 2, self._devices // 2, self._devices])
        self._number += 1
        runs.run_submit(
            owner=self._owner, name=f"chaos-{self._number}", spec=self._spec(ranks), force=True
        )

    def _spec(self, ranks: int) -> dict[str, Any]:
        plan = {"dp": ranks, "micro_batch_size": 1, "global_batch_size": ranks}
        steps = LONG_STEPS if self._chance.random() < LONG_SHARE else self._steps
        checkpoint = {"every_steps": 10, "keep": 1000, "async": False}
        classes = ("user_error", "out_of_memory", "numerics", "hang", "infrastructure", "lost")
        return {
            "kind": "train",
            "plan": plan,
            "train": {"steps": steps, "seq_len": 32, "checkpoint": checkpoint},
            "retries": dict.fromkeys(classes, 10_000),
        }
