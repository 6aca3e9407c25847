"""Old leases are removed; what a node writes there is never loaded beyond a limit."""

from __future__ import annotations

import pytest
import redis

from orchestrator.common import redis as common_redis
from orchestrator.scheduling.reports import revocation
from workers.contracts.wire import liveness


@pytest.mark.parametrize(
    "flood",
    [{f"invented {n}": "1" for n in range(1001)}, {"x" * (2**20 + 1): "1"}, {"a": "x" * 2**21}],
    ids=["fields", "name", "value"],
)
def test_leases_beyond_the_limit_are_deleted_without_reading_them(
    redis_url: str, settings: object, flood: dict[str, str]
) -> None:
    settings.REDIS_URL = redis_url  # type: ignore[attr-defined]
    common_redis.reset()
    with redis.Redis.from_url(redis_url, decode_responses=True) as broker:
        broker.flushall()
        broker.hset(liveness.leases_key("bad"), mapping=flood)
        broker.hset(liveness.leases_key("good"), mapping={"open": "1", "ended": "1"})
        broker.set(liveness.leases_key("other"), "text")
        revocation.prune({"open"}, ["bad", "good", "other", "none"])
        assert not broker.exists(liveness.leases_key("bad"))
        assert broker.hgetall(liveness.leases_key("good")) == {"open": "1"}
        broker.flushall()
    common_redis.reset()
