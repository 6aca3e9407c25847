"""Allocated devices that do no work, as a user may see them."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime, timedelta

from orchestrator.accounts.models import User
from orchestrator.common import clock
from orchestrator.device_history.models import IdleDevice
from orchestrator.device_history.series import IDLE_AFTER_S
from orchestrator.runs import selectors as runs


@dataclass(frozen=True)
class IdleRun:
    """The run that holds an idle device."""

    id: int
    name: str
    kind: str
    state: str
    owner: str


@dataclass(frozen=True)
class Idle:
    """A device that an attempt holds without work since a time; `run` is None if it is hidden."""

    node: str
    index: int
    pool: str
    since: datetime
    idle_s: float
    run: IdleRun | None


def idle_devices_visible_to(*, user: User, pool: str = "") -> list[Idle]:
    """Devices that have been idle for ten minutes, longest first; of one pool if it is named.

    Every active user sees the devices, and the runs that they may see.
    """
    now = clock.now()
    rows = IdleDevice.objects.filter(since__lte=now - timedelta(seconds=IDLE_AFTER_S))
    if pool:
        rows = rows.filter(device__node__pool__name=pool)
    if not user.is_active:
        rows = rows.none()
    values = list(
        rows.order_by("since", "device__node__name", "device__index").values_list(
            "device__node__name",
            "device__index",
            "device__node__pool__name",
            "since",
            "attempt__run_id",
        )
    )
    visible = runs.runs_visible_to(user=user).filter(pk__in={run for *_, run in values})
    names = {
        pk: IdleRun(pk, *rest)
        for pk, *rest in visible.order_by().values_list(
            "pk", "name", "kind", "state", "owner__username"
        )
    }
    return [
        Idle(node, index, name, since, (now - since).total_seconds(), names.get(run))
        for node, index, name, since, run in values
    ]
