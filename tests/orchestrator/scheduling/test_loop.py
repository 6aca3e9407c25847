"""Inbox: at-least-once delivery despite killed servers and readers. Lease: one holder."""

from __future__ import annotations

import os
import queue
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path

import pytest
import redis
from django.db import OperationalError

from orchestrator.common import clock
from orchestrator.common.stream_groups import StreamEntry
from orchestrator.scheduling import lease, loop, selectors
from orchestrator.scheduling.models import Lease
from orchestrator.scheduling.reports.inbox import Entry, Inbox
from tests.conftest import FakeClock
from tests.migrated_database import install
from tests.redis_server import RedisServer
from workers.contracts.wire import names


@pytest.fixture
def server() -> Iterator[RedisServer]:
    made = RedisServer(Path(tempfile.mkdtemp(prefix="orrery-redis-")), append_only=True).start()
    yield made
    made.stop()


def inbox(server: RedisServer, name: str) -> Inbox:
    made = Inbox(lambda: redis.Redis.from_url(server.url, socket_timeout=10), consumer=name)
    made.start()
    return made


def take(box: Inbox, wanted: Callable[[Entry], bool], seconds: float = 90) -> list[Entry]:
    """Entries up to and including the wanted one."""
    entries, deadline = [], time.monotonic() + seconds
    while time.monotonic() < deadline:
        entry = box.get(0.2)
        if entry is not None:
            entries.append(entry)
            if wanted(entry):
                return entries
    raise AssertionError(f"not within {seconds} s; got {entries}")


def test_entries_and_wakes_arrive_and_acknowledged_entries_are_deleted(server: RedisServer) -> None:
    box = inbox(server, "a")
    with server.client() as client:
        client.xadd(names.REPORTS, {"m": "one"})
        [entry] = take(box, lambda entry: entry.text == b"one")
        client.lpush(names.TICK, "1")
        take(box, lambda entry: entry.source is None)
        assert entry.source is not None
        box.acknowledge(entry.source)
        box.flush()
        assert (
            client.xlen(names.REPORTS) == 0
            and client.xpending(names.REPORTS, names.REPORTS_GROUP)["pending"] == 0
        )
    box.stop()


def test_entries_of_a_dead_reader_are_read_by_the_next(server: RedisServer) -> None:
    first = inbox(server, "a")
    with server.client() as client:
        for text in ("one", "two"):
            client.xadd(names.REPORTS, {"m": text})
        take(first, lambda entry: entry.text == b"two")  # read, not acknowledged
        first.stop()
        second = inbox(server, "b")
        assert [entry.text for entry in take(second, lambda entry: entry.text == b"two")] == [
            b"one",
            b"two",
        ]
        second.stop()


@pytest.mark.parametrize("data_survives", [True, False])
def test_a_killed_server_loses_no_stored_entry(server: RedisServer, data_survives: bool) -> None:
    box = inbox(server, "a")
    with server.client() as client:
        client.xadd(names.REPORTS, {"m": "before"})
        # the append-only file is synced every second
        synced = client.execute_command("WAITAOF", 1, 0, 90_000)
        assert synced[0] == 1
    take(box, lambda entry: entry.text == b"before")
    server.kill()
    if not data_survives:
        for path in server.directory.rglob("*.aof*"):
            path.unlink()
    time.sleep(0.3)
    server.start()
    with server.client() as client:
        client.xadd(names.REPORTS, {"m": "after"})
        client.lpush(names.TICK, "1")
    texts = [entry.text for entry in take(box, lambda entry: entry.text == b"after")]
    assert (b"before" in texts) == data_survives, "what was not acknowledged is read again"
    box.stop()


@pytest.mark.django_db
def test_one_holder_at_a_time_and_the_next_after_expiry() -> None:
    elsewhere = "another-host-1-abcd"
    assert lease.hold(elsewhere) and lease.hold(elsewhere, beat=True)
    mine = lease.new_holder()
    assert not lease.hold(mine) and Lease.objects.get().holder == elsewhere
    Lease.objects.update(expires=clock.now() - timedelta(seconds=1))
    assert lease.hold(mine) and not lease.hold(elsewhere)
    lease.release(mine)
    assert lease.hold(elsewhere)


@pytest.mark.django_db
def test_a_holder_that_died_on_this_machine_is_not_waited_for() -> None:
    child = subprocess.Popen([sys.executable, "-c", "pass"])
    child.wait()
    dead = lease.new_holder().replace(str(os.getpid()), str(child.pid))
    assert lease.hold(dead)
    assert lease.hold(lease.new_holder())


@pytest.mark.django_db
def test_renewing_extends_an_own_lease_and_takes_none() -> None:
    mine = lease.new_holder()
    assert not lease.renew(mine) and not Lease.objects.exists()
    assert lease.hold(mine, beat=True)
    beat = Lease.objects.get().beat
    Lease.objects.update(expires=clock.now())
    assert lease.renew(mine)
    row = Lease.objects.get()
    assert row.expires > clock.now() + lease.LIFE / 2
    assert row.beat == beat, "only a completed pass is a sign of life on /health/"
    Lease.objects.update(holder="another-host-1-abcd", expires=clock.now())
    assert not lease.renew(mine) and Lease.objects.get().holder == "another-host-1-abcd"


def test_the_lease_is_renewed_during_a_long_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    renewed: queue.Queue[str] = queue.Queue()
    monkeypatch.setattr(lease, "renew", renewed.put)
    renewal = lease.Renewal("me", renew_s=0.001)
    assert [renewed.get(timeout=60) for _ in range(3)] == ["me"] * 3
    renewal.close()
    while not renewed.empty():
        renewed.get()
    stuck = lease.Renewal("me", renew_s=0.001, stuck_s=-1.0)
    stuck._thread.join(60)
    assert not stuck._thread.is_alive() and renewed.empty(), "a stuck loop loses its lease"
    stuck.close()


@pytest.mark.django_db
def test_health_reports_a_stopped_scheduler(
    redis_url: str, settings: object, clock: FakeClock
) -> None:
    from orchestrator.common import redis as common_redis

    settings.REDIS_URL = redis_url  # type: ignore[attr-defined]
    common_redis.reset()
    assert not selectors.health()["ok"]
    assert lease.hold("a-host-1-x", beat=True)
    health = selectors.health()
    assert health["ok"] and health["troubles"] == [] and health["ingest"]["lag_s"] == 0.0
    Lease.objects.update(beat=clock.now() - timedelta(seconds=60))
    health = selectors.health()
    assert not health["ok"] and "last ran 60 s ago" in health["troubles"][0]
    common_redis.reset()


@pytest.mark.flow
def test_the_command_stops_on_sigterm(
    server: RedisServer, tmp_path: Path, migrated_database: Path
) -> None:
    root = Path(__file__).resolve().parents[3]
    environ = {
        key: value
        for key, value in os.environ.items()
        if not key.startswith(("ORRERY_", "DJANGO_", "DATABASE_"))
    }
    environ |= {"ORRERY_HOME": str(tmp_path), "REDIS_URL": server.url}
    install(migrated_database, tmp_path)
    command = [sys.executable, str(root / "manage.py"), "scheduler"]
    process = subprocess.Popen(command, env=environ, stderr=subprocess.PIPE)
    assert process.stderr is not None
    assert b"Scheduling as" in process.stderr.readline()
    process.send_signal(signal.SIGTERM)
    assert process.wait(120) == 0
    process.stderr.close()


@pytest.mark.django_db
def test_a_database_failure_at_the_start_is_repaired_by_the_next_pass(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    started: list[str] = []

    class FakeInbox(QueuedInbox):
        def __init__(self, connect: object, consumer: str) -> None:
            super().__init__([])

        def start(self, nodes: list[str]) -> None:
            started.append("inbox")

        def get(self, timeout_s: float) -> Entry | None:
            raise KeyboardInterrupt  # the start is complete

    class FakeServices:
        def __init__(self, holder: str, drained: Callable[[], bool]) -> None:
            started.append("services")
            self.renewal = self

        def alive(self) -> None: ...

    def node_names() -> list[str]:
        monkeypatch.setattr(loop.fleet, "node_names", list)
        raise OperationalError("the database is down")

    monkeypatch.setattr(loop, "Inbox", FakeInbox)
    monkeypatch.setattr(loop, "_Services", FakeServices)
    monkeypatch.setattr(loop.control_versions, "publish", lambda: None)
    monkeypatch.setattr(loop.broker_users, "broker_start", lambda: None)
    monkeypatch.setattr(loop, "close_old_connections", lambda: None)
    monkeypatch.setattr(loop.fleet, "node_names", node_names)
    scheduler = loop.Loop()
    with pytest.raises(OperationalError):
        scheduler._iterate()
    assert started == [] and scheduler._inbox is None
    with pytest.raises(KeyboardInterrupt):
        scheduler._iterate()
    assert sorted(started) == ["inbox", "services"] and scheduler._services is not None


class QueuedInbox:
    """An inbox whose entries are known; `acknowledged` are those that were handled."""

    def __init__(self, entries: list[Entry]) -> None:
        self.left, self.acknowledged = entries, list[bytes]()

    def get(self, timeout_s: float) -> Entry | None:
        return self.left.pop(0) if self.left else None

    def acknowledge(self, entry: StreamEntry) -> None:
        self.acknowledged.append(entry.id)


def test_no_entry_of_a_long_backlog_is_skipped(monkeypatch: pytest.MonkeyPatch) -> None:
    ids = [b"%d-0" % number for number in range(1, 301)]
    box = QueuedInbox([Entry(StreamEntry(names.REPORTS, id, {}), id) for id in ids])
    handled: list[bytes] = []
    monkeypatch.setattr(loop, "report", lambda text, **more: handled.append(text))
    scheduler = loop.Loop()
    bursts = 0
    while (entry := box.get(0.0)) is not None:
        scheduler._handle(box, entry)  # type: ignore[arg-type]
        bursts += 1
    assert handled == box.acknowledged == ids
    assert bursts == 3
