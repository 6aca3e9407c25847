"""The lease: an outage of the broker extends it, a partition ends the ranks before it ends."""

from __future__ import annotations

import errno
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest
import redis

from tests.redis_server import RedisServer
from workers.contracts.wire import liveness
from workers.launcher.lease import Lease, broker_is_down


@pytest.fixture
def server(tmp_path: Path) -> Iterator[RedisServer]:
    server = RedisServer(tmp_path).start()
    yield server
    server.stop()


def lease_of(url: str, *, host_answers: bool = True, lease_s: float | None = 30.0) -> Lease:
    return Lease(
        fence="f",
        node="n1",
        lease_s=lease_s,
        redis_url=lambda: url,
        host_answers=lambda url: host_answers,
    )


def test_each_renewal_changes_the_nodes_own_key(server: RedisServer) -> None:
    lease = lease_of(server.url)
    with redis.Redis.from_url(server.url) as client:
        values = set()
        for _ in range(2):
            lease.renew()
            values.add(client.hget(liveness.leases_key("n1"), "f"))
        assert len(values) == 2 and None not in values
    assert lease.stop_request is None and lease.granted


def test_ranks_start_only_with_a_lease(server: RedisServer) -> None:
    late = lease_of(server.url)
    with redis.Redis.from_url(server.url) as client:
        client.hset(liveness.REVOKED, "f", "1")  # its launch order waited for too long
    late.renew()
    assert not late.granted and late.stop_request is not None
    down = lease_of("redis://127.0.0.1:1/0", host_answers=True)
    down.renew()
    assert not down.granted and down.stop_request is None, "it waits for the broker"
    assert lease_of(server.url, lease_s=None).granted, "this control plane grants no leases"


def test_a_revoked_attempt_is_killed(server: RedisServer) -> None:
    lease = lease_of(server.url)
    lease.renew()
    with redis.Redis.from_url(server.url) as client:
        client.hset(liveness.REVOKED, "f", "1")
        lease.renew()
        assert lease.stop_request is not None and lease.stop_request.action == "kill"
        assert not client.hexists(liveness.leases_key("n1"), "f")


def test_an_outage_of_the_broker_extends_the_lease() -> None:
    lease = lease_of("redis://127.0.0.1:1/0", host_answers=True)
    lease._contact -= 600.0
    lease.renew()
    assert lease.stop_request is None and lease.silence_s < 10


def test_a_partition_stops_the_ranks_before_the_lease_ends() -> None:
    lease = lease_of("redis://127.0.0.1:1/0", host_answers=False)
    lease._contact -= 15.0
    lease.renew()
    assert lease.stop_request is None
    lease._contact -= 5.0
    lease.renew()
    assert lease.stop_request is not None and lease.stop_request.action == "preempt"
    lease._contact -= 10.0
    lease.renew()
    assert lease.stop_request.action == "kill"


def test_an_order_without_lease_never_stops() -> None:
    lease = lease_of("redis://127.0.0.1:1/0", host_answers=False, lease_s=None)
    lease._contact -= 1e6
    lease.renew()
    assert lease.stop_request is None


def test_evidence_of_an_outage() -> None:
    """A refused or accepted connection comes from the broker's host; silence does not."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
        assert broker_is_down(f"redis://127.0.0.1:{port}/0"), "refused"
        listener.listen(1)
        assert broker_is_down(f"redis://127.0.0.1:{port}/0"), "accepted, but silent"
    assert broker_is_down("unix:///nowhere/redis.sock")


@pytest.mark.parametrize("error", [TimeoutError(), OSError(errno.EHOSTUNREACH, "no route")])
def test_a_host_that_does_not_answer_is_no_outage(
    error: OSError, monkeypatch: pytest.MonkeyPatch
) -> None:
    def connect(address: object, timeout: float) -> None:
        raise error

    monkeypatch.setattr("workers.launcher.lease.socket.create_connection", connect)
    assert not broker_is_down("redis://10.0.0.1:6379/0")
