"""Jobs of runs that are cancelled or paused while the job waits in its engine."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest

from orchestrator.accounts.models import User
from orchestrator.fleet.cluster_engines import members
from orchestrator.fleet.models import Engine as EngineRow
from orchestrator.fleet.models import EngineMember
from orchestrator.runs import services as runs
from orchestrator.runs.models import Run
from orchestrator.scheduling import services
from tests.orchestrator.scheduling.conftest import Broker
from tests.orchestrator.scheduling.recorded_engine import Recorded, one_pass
from workers.contracts.wire import envelope, names

pytestmark = [pytest.mark.django_db, pytest.mark.usefixtures("broker")]


def requested(broker: Broker) -> str | None:
    """The action that the job's supervisor reads."""
    member = EngineMember.objects.get()
    text = broker.client.get(names.node_key(member.name, names.ENGINE_REQUEST))
    if text is None:
        return None
    assert isinstance(text, bytes)
    body = envelope.open_envelope(
        members.member_secret(member), text, kind=names.KIND_CONTROL, now=time.time()
    )
    return str(body["action"])


@pytest.mark.parametrize("stop", [runs.run_cancel, runs.run_pause])
def test_a_job_that_starts_just_after_its_run_was_stopped_is_stopped(
    broker: Broker, engine: EngineRow, run: Run, stop: Callable[..., Run]
) -> None:
    """Its supervisor reads the request when it starts, before the engine's next pass."""
    attempt = one_pass(engine, Recorded(), run)
    services.reap()
    assert attempt is not None and requested(broker) is None
    stop(run=run, by=User.objects.get(pk=run.owner_id))
    services.reap()
    attempt.refresh_from_db()
    assert (attempt.state, attempt.requested) == ("assigned", "")
    assert requested(broker) == "cancel"
