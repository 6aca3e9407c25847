"""Beside ingest, what is old goes by itself: frames past their hour, idempotency keys past their
day.
"""

from __future__ import annotations

import threading
import time
from datetime import timedelta

import pytest

from orchestrator.accounts import services as accounts
from orchestrator.accounts.models import IdempotencyKey
from orchestrator.common import clock, live
from orchestrator.common.models import Frame
from orchestrator.telemetry.retention import keep_house
from tests import factories


@pytest.mark.django_db(transaction=True)
def test_old_frames_and_keys_go_and_new_ones_stay() -> None:
    ada = factories.user("ada")
    for key in ("old", "new"):
        live.append("fleet", "queue", {"key": key})
        accounts.idempotent_begin(user=ada, key=key, route="POST /runs", body=b"")
    yesterday = clock.now() - timedelta(hours=25)
    Frame.objects.filter(text__contains="old").update(created=yesterday)
    IdempotencyKey.objects.filter(key="old").update(created=yesterday)
    stop = threading.Event()
    house = threading.Thread(target=keep_house, args=(stop,))
    house.start()
    deadline = time.monotonic() + 90
    while IdempotencyKey.objects.count() > 1 and time.monotonic() < deadline:
        time.sleep(0.02)
    stop.set()
    house.join(90)
    assert not house.is_alive()
    assert IdempotencyKey.objects.get().key == "new"
    assert "new" in Frame.objects.get().text
