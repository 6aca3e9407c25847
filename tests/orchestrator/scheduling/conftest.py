"""A real Redis, orders sent to nodes, and fake nodes that send reports."""

from __future__ import annotations

import base64
import json
import time
from collections.abc import Iterator
from typing import Any

import pytest
import redis

from orchestrator.common import redis as common_redis
from orchestrator.fleet import selectors as fleet
from orchestrator.fleet.cluster_engines import services as engines
from orchestrator.fleet.models import Engine as EngineRow
from orchestrator.fleet.models import Node
from orchestrator.runs import services as runs
from orchestrator.runs.models import Attempt, Run
from orchestrator.scheduling import services
from orchestrator.scheduling.reports import heartbeat_handler
from orchestrator.scheduling.reports.missing_attempts import presence
from orchestrator.scheduling.reports.silence import NewHeartbeat
from tests import factories
from workers.contracts.wire import envelope, names, versions


class Broker:
    """The session's Redis, emptied, used as settings.REDIS_URL."""

    def __init__(self, client: redis.Redis) -> None:
        self.client = client

    def orders(self, node: Node) -> list[tuple[str, dict[str, Any]]]:
        """Remove the orders in a node's queue: `(kind, body)`, opened with its secret."""
        orders = []
        while message := self.client.rpop(names.node_queue(node.name)):
            args = json.loads(base64.b64decode(json.loads(message)["body"]))[0]
            kind = envelope.peek(args[0])[0]
            orders.append(
                (
                    kind,
                    envelope.open_envelope(
                        fleet.node_secret(node), args[0], kind=kind, now=time.time()
                    ),
                )
            )
        return orders


class FakeNode:
    """Sends reports of a node's agent and supervisors directly to the service."""

    def __init__(self, node: Node) -> None:
        self.node = node
        self.seq = 0

    def sealed(self, kind: str, body: dict[str, Any], **more: Any) -> str:
        secret = more.pop("secret", None) or fleet.node_secret(self.node)
        more = {"ttl_s": 60, "now": time.time(), "node": self.node.name, **more}
        return envelope.seal(secret, kind, body, **more)

    def beat(self, *attempts: Attempt, state: str = "running") -> bool:
        states = [{"fence": str(attempt.fence), "state": state} for attempt in attempts]
        body = {"node": self.node.name, "time": time.time(), "attempts": states}
        body |= {"release": versions.RELEASE, "wire": str(versions.WIRE)}
        text = self.sealed(names.KIND_HEARTBEAT, body).encode()
        return heartbeat_handler.apply([NewHeartbeat(self.node.name, time.time(), text)])

    def send_report(self, attempt: Attempt, kind: str, /, **data: Any) -> bool:
        self.seq += 1
        body = {
            "attempt_id": str(attempt.pk),
            "fence": str(data.pop("fence", attempt.fence)),
            "node": self.node.name,
            "seq": self.seq,
            "time": time.time(),
            "type": kind,
            "data": data,
        }
        return services.report(self.sealed(names.KIND_REPORT, body))

    def exited(self, attempt: Attempt, exit_class: str, **data: Any) -> bool:
        return self.send_report(
            attempt, "exited", **{"class": exit_class, "reason": exit_class, **data}
        )


@pytest.fixture
def broker(redis_url: str, settings: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[Broker]:
    settings.REDIS_URL = redis_url
    common_redis.reset()
    client = redis.Redis.from_url(redis_url)
    client.flushall()
    for table in (presence.missing, presence.sent, presence.first):
        table.clear()
    yield Broker(client)
    client.close()
    common_redis.reset()


@pytest.fixture
def engine() -> EngineRow:
    row = engines.engine_add(by=None, name="hpc")
    engines.engine_pool_set(engine=row, by=None, pool="hpc-low", settings={"partition": "low"})
    return row


@pytest.fixture
def run(engine: EngineRow) -> Run:
    owner = factories.user("ada", role="submitter")
    spec = factories.spec(resources={"pool": "hpc-low"})
    return runs.run_submit(owner=owner, name="slurm", spec=spec)
