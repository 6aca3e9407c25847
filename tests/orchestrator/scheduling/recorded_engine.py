"""A fake engine with a list of jobs, and passes over it."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from orchestrator.fleet.models import Engine as EngineRow
from orchestrator.runs.models import Attempt, Run
from orchestrator.scheduling.cluster_engines.interface import (
    Capacity,
    EngineUnavailable,
    JobView,
    Order,
)
from orchestrator.scheduling.cluster_engines.slurm import parse
from orchestrator.scheduling.cluster_engines.sync import sync
from orchestrator.scheduling.models import EngineJob


class Recorded:
    """An engine that keeps a list of jobs; `failure` is raised by the next submissions."""

    problem = ""

    def __init__(self) -> None:
        self.jobs: dict[str, JobView] = {}
        self.orders: list[Order] = []
        self.cancelled: set[str] = set()
        self.failure: Exception | None = None
        self.accepts = True
        self.down = False

    def submit(self, order: Order) -> str:
        self.orders.append(order)
        number = str(len(self.orders))
        if self.accepts:
            self.jobs[order.name] = parse.view(order.name, number, "PENDING", "Resources")
        if self.failure is not None:
            raise self.failure
        return number

    def cancel(self, numbers: Collection[str], *, kill: bool = False) -> None:
        self.cancelled |= set(numbers)

    def watch(self) -> dict[str, JobView]:
        if self.down:
            raise EngineUnavailable("Unable to contact slurm controller")
        return dict(self.jobs)

    def lookup(self, *, number: str, name: str) -> JobView | None:
        return None

    def capacity(self) -> Capacity:
        return Capacity("22.05.8")

    def explain(self, view: JobView, pool: Mapping[str, object]) -> str:
        return f"Job {view.number} waits: {view.reason}."

    def become(self, run: Run, state: str, reason: str = "") -> None:
        job = EngineJob.objects.get(attempt__run=run, attempt__number=run.attempt_number)
        self.jobs[job.name] = parse.view(job.name, job.number or "1", state, reason, "n1")


def one_pass(engine: EngineRow, port: Any, run: Run, *, times: int = 1) -> Attempt | None:
    for _ in range(times):
        sync(EngineRow.objects.get(pk=engine.pk), port)
    run.refresh_from_db()
    return Attempt.objects.filter(run=run).order_by("-number").first()
