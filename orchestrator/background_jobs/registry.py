"""The jobs by name: what each does and how often. Does not depend on Celery or on the schedule."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final

from orchestrator.alerts import services as alerts
from orchestrator.background_jobs import (
    garbage,
    idle_probes,
    retention,
    slow_devices,
    store_garbage,
)
from orchestrator.background_jobs.exports import requests
from orchestrator.background_jobs.notifications import collect, subscriptions
from orchestrator.background_jobs.simulations import requests as simulations
from orchestrator.background_jobs.usage import measure
from orchestrator.common import clock
from orchestrator.fleet.cluster_engines import services as engines
from orchestrator.runs import services as runs
from orchestrator.runs.datasets import registration
from orchestrator.scheduling.queue import start_estimates
from orchestrator.sweeps.advance import sweeps_advance


@dataclass(frozen=True, slots=True)
class Work:
    """What a job receives: whether it only counts, and a call that renews its lease."""

    dry_run: bool
    renew: Callable[[], None]


@dataclass(frozen=True, slots=True)
class JobType:
    """One job. `work` returns counts by name and may run again after any failure."""

    name: str
    period_s: float
    work: Callable[[Work], dict[str, int]]
    frequent: bool = False  # runs that change nothing are not recorded
    has_dry_run: bool = True


def _frames(work: Work) -> dict[str, int]:
    return retention.retain(
        policies=retention.FREQUENT, now=clock.now(), dry_run=work.dry_run, renew=work.renew
    )


def _retention(work: Work) -> dict[str, int]:
    return retention.retain(
        policies=retention.POLICIES, now=clock.now(), dry_run=work.dry_run, renew=work.renew
    )


def _secrets(work: Work) -> dict[str, int]:
    return {
        "script_secrets": runs.script_secrets_renew(dry_run=work.dry_run),
        "engines": engines.secrets_renew(dry_run=work.dry_run),
        "subscriptions": subscriptions.secrets_renew(dry_run=work.dry_run),
    }


def _notifications(work: Work) -> dict[str, int]:
    return {"messages": collect.collect()}


def _slow_devices(work: Work) -> dict[str, int]:
    return slow_devices.mark_slow()


def _idle_probes(work: Work) -> dict[str, int]:
    return idle_probes.probe_idle()


def _garbage(work: Work) -> dict[str, int]:
    return garbage.collect_garbage(dry_run=work.dry_run, renew=work.renew)


def _store_garbage(work: Work) -> dict[str, int]:
    return store_garbage.collect(dry_run=work.dry_run, renew=work.renew)


def _data_sets(work: Work) -> dict[str, int]:
    return registration.register_waiting(dry_run=work.dry_run, renew=work.renew)


def _usage(work: Work) -> dict[str, int]:
    return measure.measure_due(now=clock.now(), dry_run=work.dry_run, renew=work.renew)


def _exports(work: Work) -> dict[str, int]:
    return requests.build_exports(dry_run=work.dry_run, renew=work.renew)


def _sweeps(work: Work) -> dict[str, int]:
    return sweeps_advance(renew=work.renew)


def _alerts(work: Work) -> dict[str, int]:
    return {name: count for name, count in alerts.evaluate().items() if count}


def _simulations(work: Work) -> dict[str, int]:
    return simulations.run_simulations(dry_run=work.dry_run, renew=work.renew)


def _queue_estimates(work: Work) -> dict[str, int]:
    start_estimates.compute()
    return {}


JOBS: Final[Mapping[str, JobType]] = {
    job.name: job
    for job in (
        JobType("frames", 60.0, _frames, frequent=True),
        JobType("retention", 3600.0, _retention),
        JobType("secrets", 3600.0, _secrets, frequent=True),
        JobType("exports", 5.0, _exports, frequent=True),
        JobType("data-sets", 5.0, _data_sets, frequent=True),
        JobType("simulations", 3.0, _simulations, frequent=True),
        JobType("queue-estimates", 30.0, _queue_estimates, frequent=True, has_dry_run=False),
        JobType("garbage", 3600.0, _garbage),
        JobType("store-garbage", 3600.0, _store_garbage),
        JobType("usage", 3600.0, _usage),
        JobType("slow-devices", 30.0, _slow_devices, frequent=True, has_dry_run=False),
        JobType("idle-probes", 60.0, _idle_probes, frequent=True, has_dry_run=False),
        JobType("alerts", 30.0, _alerts, frequent=True, has_dry_run=False),
        JobType("sweeps", 5.0, _sweeps, frequent=True, has_dry_run=False),
        JobType("notifications", 5.0, _notifications, frequent=True, has_dry_run=False),
    )
}
