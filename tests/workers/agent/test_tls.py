"""Agent, supervisor and the control plane's clients over TLS, with a test authority."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import redis

from orchestrator.common import redis as control_redis
from orchestrator.scheduling import celery_client
from tests.secure_redis import SecureRedis, secure_redis  # noqa: F401  (fixture)
from tests.workers.agent.conftest import Agent
from tests.workers.launcher.harness import script
from workers.contracts.wire import names
from workers.contracts.wire.broker.tls import tls_options

pytestmark = pytest.mark.flow


@pytest.fixture
def secure_agent(
    secure_redis: SecureRedis,  # noqa: F811
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> Iterator[Agent]:
    monkeypatch.setenv("ORRERY_REDIS_CA", str(secure_redis.ca))
    made = Agent(tmp_path / "home", secure_redis.url)
    yield made
    made.close()


def test_a_node_joins_runs_and_reports_over_tls(secure_agent: Agent) -> None:
    secure_agent.start()
    order = secure_agent.bench.order(script("print('over TLS', flush=True)"), ranks=1)
    secure_agent.launch(order)
    assert secure_agent.bench.exited(order)["class"] == "ok"
    assert secure_agent.bench.lines(0) == ["over TLS"]
    secure_agent.end()


def test_control_plane_clients_use_tls(
    secure_redis: SecureRedis,  # noqa: F811
    settings: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("ORRERY_REDIS_CA", str(secure_redis.ca))
    settings.REDIS_URL = secure_redis.url
    control_redis.reset()
    try:
        assert control_redis.client().ping()
        celery_client.send([celery_client.Order("agent.probe", "n9", "text")])
        assert control_redis.client().llen(names.node_queue("n9")) == 1
    finally:
        control_redis.reset()

    async def ping() -> bool:
        async with redis.asyncio.Redis.from_url(
            secure_redis.url, **tls_options(secure_redis.url)
        ) as client:
            return bool(await client.ping())

    assert asyncio.run(ping())


def test_a_server_of_another_authority_or_name_is_refused(
    secure_redis: SecureRedis,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def ping(url: str) -> None:
        with redis.Redis.from_url(url, **tls_options(url)) as client:
            client.ping()

    with pytest.raises(redis.ConnectionError, match="certificate verify failed"):
        ping(secure_redis.url)  # no authority is configured, and the system's did not sign it
    monkeypatch.setenv("ORRERY_REDIS_CA", str(secure_redis.ca))
    ping(secure_redis.url)
    with pytest.raises(redis.ConnectionError, match="certificate verify failed"):
        ping(secure_redis.url.replace("127.0.0.1", "localhost"))
