"""Runs that train without ranks: state changes and points by the services that reports use."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from orchestrator.fleet.models import Node
from orchestrator.runs import services as runs
from orchestrator.runs.models import Attempt, Run
from orchestrator.sweeps.advance import sweeps_advance
from orchestrator.sweeps.models import Sweep
from orchestrator.telemetry import services as telemetry
from tests import factories
from tests.conftest import FakeClock
from tests.orchestrator.telemetry.conftest import batch_of

Loss = Callable[[dict[str, Any], int], float]  # spec, step


class Training:
    """All runs of the database; `loss` is the metric that they log."""

    def __init__(self, node: Node, clock: FakeClock, loss: Loss, *, metric: str = "loss") -> None:
        self.node, self.clock, self.loss, self.metric = node, clock, loss, metric
        self.most_at_once = 0

    def advance(self, steps: int) -> None:
        """Start what is queued, train each run for this many steps, end what has ended."""
        self.clock.advance(60)
        for run in Run.objects.filter(state="queued").order_by("pk"):
            if not run.summary.get("step"):
                first = run.checkpoints.order_by("-step").values_list("step", flat=True).first()
                self._summarize(run, first or 0)
            factories.running(run, self.node)
        training = list(Run.objects.filter(state__in=("running", "stopping")).order_by("pk"))
        self.most_at_once = max(self.most_at_once, len(training))
        for run in training:
            self._train(run, steps)

    def until_end(self, sweep: Sweep, *, steps: int, passes: int = 200) -> Sweep:
        """Passes of the job and of training in turn, until the sweep ends."""
        for _ in range(passes):
            sweeps_advance()
            sweep.refresh_from_db()
            if sweep.state != "running":
                return sweep
            self.advance(steps)
        raise AssertionError(f"the sweep has not ended after {passes} passes")

    def _train(self, run: Run, steps: int) -> None:
        done, last = int(run.summary["step"]), int(run.spec["train"]["steps"])
        new = range(done + 1, min(done + steps, last) + 1)
        attempt = Attempt.objects.get(run=run, number=run.attempt_number)
        if new:
            values = {self.metric: lambda step: self.loss(run.spec, step)}
            batch = batch_of(run, new, attempt=run.attempt_number, **values)
            telemetry.points_store(run=run, attempt=run.attempt_number, batches=[batch])
            self._summarize(run, new[-1])
        if run.requested == "pause":
            path = f"runs/{run.pk}/checkpoints/step_{run.summary['step']}"
            runs.checkpoint_record(
                run=run, attempt=run.attempt_number, step=run.summary["step"], path=path
            )
            runs.attempt_exited(attempt=attempt, exit_class="preempted")
        elif run.requested == "cancel":
            runs.attempt_exited(attempt=attempt, exit_class="cancelled")
        elif run.summary["step"] >= last:
            runs.attempt_exited(attempt=attempt, exit_class="ok")

    def _summarize(self, run: Run, step: int) -> None:
        run.refresh_from_db()
        summary = {**run.summary, "step": step}
        runs.summary_update(run=run, summary=summary, seen=self.clock.now())
        run.refresh_from_db()


def bowl(spec: dict[str, Any], step: int) -> float:
    """Lowest at lr 0.01; falls with steps."""
    lr = float(spec["train"]["optimizer"]["lr"])
    return abs(math.log10(lr) + 2) + 1 / step
