"""How soon an agent's consumer is back after an outage of the broker."""

from __future__ import annotations

import pytest
from kombu.exceptions import OperationalError
from kombu.utils import functional

from workers.agent.order_transport import Amqp, Connection


def test_the_consumer_tries_every_5_s_at_most(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(functional, "sleep", lambda seconds: None)
    waits: list[float] = []
    assert Amqp.Connection is Connection
    with (
        Connection("redis://127.0.0.1:1/0") as connection,
        pytest.raises(OperationalError),
    ):
        # as Celery's worker calls it
        connection.ensure_connection(
            lambda error, interval: waits.append(interval), 8, callback=lambda: None
        )
    assert len(waits) >= 7 and max(waits) == 5.0 and waits[0] <= 1.0
