"""The retention thread deletes frames after an hour and idempotency keys after a day."""

from __future__ import annotations

import threading
import time
from datetime import timedelta

import pytest

from orchestrator.accounts import services as accounts
from orchestrator.accounts.models import IdempotencyKey
from orchestrator.common import clock, live
from orchestrator.common.models import Frame
from orchestrator.telemetry.retention import retention_loop
from tests import factories


@pytest.mark.django_db(transaction=True)
def test_old_frames_and_keys_are_deleted_and_new_ones_stay() -> None:
    ada = factories.user("ada")
    for key in ("old", "new"):
        live.append("fleet", "queue", {"key": key})
        accounts.idempotent_begin(user=ada, key=key, route="POST /runs", body=b"")
    yesterday = clock.now() - timedelta(hours=25)
    Frame.objects.filter(text__contains="old").update(created=yesterday)
    IdempotencyKey.objects.filter(key="old").update(created=yesterday)
    stop = threading.Event()
    worker = threading.Thread(target=retention_loop, args=(stop,))
    worker.start()
    deadline = time.monotonic() + 90
    while IdempotencyKey.objects.count() > 1 and time.monotonic() < deadline:
        time.sleep(0.02)
    stop.set()
    worker.join(90)
    assert not worker.is_alive()
    assert IdempotencyKey.objects.get().key == "new"
    assert "new" in Frame.objects.get().text
