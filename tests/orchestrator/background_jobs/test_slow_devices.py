"""Straggler events mark the device of their rank; a later gang without one clears the mark."""

from __future__ import annotations

from typing import Any

import pytest

from orchestrator.accounts.models import User
from orchestrator.background_jobs import slow_devices
from orchestrator.common import clock
from orchestrator.config.env.variables import Env
from orchestrator.fleet.models import Cordon, Device, Node
from orchestrator.runs import services as runs
from orchestrator.runs.models import Attempt
from orchestrator.scheduling import services
from orchestrator.scheduling.reports import attempt_end
from tests import factories

pytestmark = pytest.mark.django_db


@pytest.fixture
def node(live_redis: str) -> Node:
    return factories.node("n1", devices=2)


def gang(owner: User, fake: Any, *, late: bool) -> Attempt:
    """A gang of two ranks that runs for two minutes."""
    run = factories.run(owner, devices=2)
    services.tick(now=clock.now())
    attempt = Attempt.objects.select_related("run").get(run=run)
    runs.attempt_launching(attempt=attempt)
    runs.attempt_running(attempt=attempt)
    fake.advance(60)
    for rank, data in ((1, {"late_s": 0.05, "share": 0.4}), (0, {"held_s": 3.0})):
        if late:
            runs.event_record(run=run, type="straggler", data=data, attempt=1, rank=rank)
    fake.advance(60)
    return attempt


def end(attempt: Attempt, fake: Any) -> None:
    attempt_end.node_exited(attempt, node="n1", report={"class": "ok", "reason": "done"})
    fake.advance(60)


def test_a_straggler_marks_its_device(owner: User, node: Node, request: Any) -> None:
    fake = request.getfixturevalue("clock")
    attempt = gang(owner, fake, late=True)
    assert slow_devices.mark_slow() == {"marked": 1, "cordoned": 0, "cleared": 0}
    assert slow_devices.mark_slow()["marked"] == 0
    devices = factories.api(owner).get("/api/v1/nodes/n1").json()["devices"]
    assert devices[0]["slow"] is None
    assert devices[1]["slow"] == {
        "time": "2026-01-01T00:01:00Z",
        "run": str(attempt.run_id),
        "attempt": 1,
        "rank": 1,
        "late_s": 0.05,
        "share": 0.4,
        "runs": 1,
    }
    page = factories.client_for(owner).get("/fleet/n1/").content.decode()
    assert "other devices of its gang waited" in page and "40%" in page
    end(attempt, fake)
    end(gang(owner, fake, late=False), fake)
    assert slow_devices.mark_slow()["cleared"] == 1
    assert not Device.objects.exclude(slow=None).exists()


def test_a_device_that_several_runs_wait_for_is_cordoned(
    owner: User, node: Node, settings: Any, request: Any
) -> None:
    fake = request.getfixturevalue("clock")
    settings.ENV = Env(cordon_slow_runs=2)
    end(gang(owner, fake, late=True), fake)
    assert slow_devices.mark_slow()["cordoned"] == 0
    gang(owner, fake, late=True)
    assert slow_devices.mark_slow()["cordoned"] == 1
    cordon = Cordon.objects.get()
    assert cordon.device is not None and cordon.device.index == 1
    assert "2 runs waited for device 1" in cordon.reason and "50 ms late" in cordon.reason
