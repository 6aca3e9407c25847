"""The job `frames` deletes frames after an hour and idempotency keys after a day."""

from __future__ import annotations

from datetime import timedelta

import pytest

from orchestrator.accounts import services as accounts
from orchestrator.accounts.models import IdempotencyKey
from orchestrator.background_jobs import running
from orchestrator.common import clock, live
from orchestrator.common.models import Frame
from tests import factories


@pytest.mark.django_db
def test_old_frames_and_keys_are_deleted_and_new_ones_stay() -> None:
    ada = factories.user("ada")
    for key in ("old", "new"):
        live.append("fleet", "queue", {"key": key})
        accounts.idempotent_begin(user=ada, key=key, route="POST /runs", body=b"")
    live.number_waiting("fleet")
    yesterday = clock.now() - timedelta(hours=25)
    Frame.objects.filter(text__contains="old").update(created=yesterday)
    IdempotencyKey.objects.filter(key="old").update(created=yesterday)
    done = running.run_scheduled("frames")
    counts = {"frames": 1, "idempotency_keys": 1, "alert_mutes": 0}
    assert done is not None and done.counts == counts
    assert running.run_scheduled("frames") is None  # nothing changed: not recorded
    assert IdempotencyKey.objects.get().key == "new"
    assert "new" in Frame.objects.get().text
