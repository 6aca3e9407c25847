"""The fixture `node`: a separate home on the session's emptied Redis."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import redis

from tests.workers.launcher.harness import Node


@pytest.fixture
def node(tmp_path: Path, redis_url: str) -> Iterator[Node]:
    with redis.Redis.from_url(redis_url) as client:
        client.flushall()
    made = Node(tmp_path / "home", redis_url)
    yield made
    made.close()
