"""An agent with control planes of other releases, and run directories of the previous one."""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import redis

from tests.workers.contracts.previous_release import (
    FILES,
    KEYS,
    MESSAGES,
    SCHEMAS,
    write_run_directories,
)
from tests.workers.launcher.harness import Node
from workers.agent import __main__ as command
from workers.agent import identity
from workers.agent.attempts import Attempts
from workers.agent.reports import Reporter
from workers.contracts.wire import envelope, liveness, names, versions
from workers.contracts.wire.node_messages import (
    AttemptSeen,
    AttemptState,
    DeviceInfo,
    DeviceSample,
    NodeInventory,
)
from workers.contracts.wire.versions import WIRE, WireVersion
from workers.launcher.recovery import recover
from workers.launcher.rundir import RunDir, read_json, write_json

SECRET = b"k" * 32
SAMPLE = DeviceSample(index=0, throttled="heat")
SEEN = AttemptSeen(fence="f", state=AttemptState.RUNNING, release="0.2.0", wire=str(WIRE))
DEVICE = DeviceInfo(index=0, kind="gpu", name="gpu", memory_bytes=1, problem="XID 79")
INVENTORY = NodeInventory(
    name="n1", address="127.0.0.1", hostname="h", cores=1, memory_bytes=1, devices=[DEVICE]
)


@pytest.fixture
def broker(redis_url: str) -> Iterator[redis.Redis]:
    with redis.Redis.from_url(redis_url, decode_responses=True) as client:
        client.flushall()
        yield client


def publish(broker: redis.Redis, wire: WireVersion | str) -> None:
    broker.set(names.CONTROL, json.dumps({"release": "9.9", "wire": str(wire)}))


def old_beats(broker: redis.Redis) -> list[dict[str, Any]]:
    """The heartbeats in the reports stream, where release 0.1 reads them."""
    entries: Any = broker.xrange(names.REPORTS)
    return [
        envelope.open_envelope(SECRET, fields["m"], kind=names.KIND_HEARTBEAT, now=0.0)
        for _, fields in entries
    ]


def test_heartbeats_reach_a_scheduler_of_the_previous_release(
    broker: redis.Redis, redis_url: str
) -> None:
    reporter = Reporter(node="n1", secret=SECRET, redis_url=redis_url)
    for _ in range(2):
        assert reporter.heartbeat([SAMPLE], [SEEN], INVENTORY)
    beats = old_beats(broker)
    assert len(beats) == 2 and reporter.control is None
    jsonschema.validate(beats[0], SCHEMAS["Heartbeat"])
    assert beats[0]["inventory"]["devices"][0]["name"] == "gpu"
    # a scheduler of this release reads the complete one
    entries: Any = broker.xrange(liveness.heartbeat_key("n1"))
    [(_, fields)] = entries
    text = fields[liveness.FIELD_BEAT]
    complete = envelope.open_envelope(SECRET, text, kind=names.KIND_HEARTBEAT, now=0.0)
    assert complete["wire"] == str(WIRE) and complete["samples"][0]["throttled"] == "heat"
    publish(broker, WIRE)
    for _ in range(2):
        assert reporter.heartbeat([SAMPLE], [SEEN])
    assert len(old_beats(broker)) == 2, "the scheduler reads the node's key"
    broker.delete(names.CONTROL)  # it ended, perhaps for one of the previous release
    for _ in range(2):
        assert reporter.heartbeat([SAMPLE], [SEEN])
    assert len(old_beats(broker)) == 3, "the first one did not know it yet"


def test_heartbeats_do_not_fill_an_unread_stream(
    broker: redis.Redis, redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with broker.pipeline(transaction=False) as pipe:
        for _ in range(liveness.OLD_BEATS):
            pipe.xadd(names.REPORTS, {"m": "x"})
        pipe.execute()
    reporter = Reporter(node="n1", secret=SECRET, redis_url=redis_url)
    assert reporter.heartbeat([], []) and broker.xlen(names.REPORTS) == liveness.OLD_BEATS


@pytest.mark.parametrize(
    ("wire", "level"),
    [
        (WIRE, None),
        (WireVersion(1, 0), "WARNING"),
        (WireVersion(WIRE.major, WIRE.minor + 1), "WARNING"),
        (WireVersion(WIRE.major, WIRE.minor + 2), "ERROR"),
        ("junk", "ERROR"),
    ],
)
def test_an_agent_logs_another_version_once(
    broker: redis.Redis, redis_url: str, caplog: pytest.LogCaptureFixture, wire: Any, level: Any
) -> None:
    publish(broker, wire)
    reporter = Reporter(node="n1", secret=SECRET, redis_url=redis_url)
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            assert reporter.heartbeat([], [])
    assert [record.levelname for record in caplog.records] == ([level] if level else [])


@pytest.mark.parametrize("text", ["{", "[]", "1", '{"wire": 5}', ""])
def test_unreadable_versions_of_the_control_plane_stop_no_heartbeat(
    broker: redis.Redis, redis_url: str, text: str
) -> None:
    broker.set(names.CONTROL, text)
    reporter = Reporter(node="n1", secret=SECRET, redis_url=redis_url)
    assert reporter.heartbeat([], []) and reporter.heartbeat([], [])


def test_an_incompatible_agent_does_not_join(
    broker: redis.Redis,
    redis_url: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    publish(broker, WireVersion(WIRE.major, WIRE.minor + 2))
    words = ["agent", "--redis", redis_url, "--home", str(tmp_path), "--name", "n1"]
    monkeypatch.setattr(sys, "argv", [*words, "--join", KEYS["token"]])
    monkeypatch.setattr("logging.basicConfig", lambda **_: None)
    monkeypatch.setattr(identity, "acquire_lock", lambda folder: None)
    assert command.main() == command.INCOMPATIBLE == 76
    stated = capsys.readouterr().err
    assert "The control plane runs release 9.9" in stated and "Upgrade the agent" in stated
    assert not broker.exists(names.REPORTS), "the token was not used"


def test_a_refusal_or_another_version_in_the_reply_ends_the_join() -> None:
    request, reply = MESSAGES["join"].body()["request"], json.loads(MESSAGES["join reply"].text)
    assert identity._accepted(KEYS["token"], request, reply)[0] == "n1", "release 0.1 works"
    newer = {**reply, "release": "9.9", "wire": "7.0"}
    for answer in (newer, {"refused": "sentence", "code": names.INCOMPATIBLE}):
        with pytest.raises(identity.Incompatible):
            identity._accepted(KEYS["token"], request, answer)
    with pytest.raises(identity.NotJoined) as refused:
        identity._accepted(KEYS["token"], request, {"refused": "used before"})
    assert not isinstance(refused.value, identity.Incompatible)


@pytest.mark.parametrize("wire", [None, WireVersion(1, 0), WIRE])
def test_a_join_request_has_the_form_that_the_control_plane_reads(wire: Any) -> None:
    control = None if wire is None else versions.PeerVersion("9.9", wire)
    request = {"id": "a", "name": "n1", "nonce_a": "b", "mac": "c"}
    body = identity._join_body(request, INVENTORY, control)
    assert (body["release"], body["wire"]) == (versions.RELEASE, str(WIRE))
    if wire != WIRE:
        jsonschema.validate(body["inventory"], SCHEMAS["NodeInventory"])


def test_an_attempt_of_the_previous_release_is_recovered(tmp_path: Path, redis_url: str) -> None:
    node = Node(tmp_path / "home", redis_url)
    try:
        write_run_directories(node.home)
        run_dir = RunDir(node.home / "runs/1/attempt-1")
        attempts = Attempts(node.home, "n1", node.node_file)
        assert attempts.attach() == 0 and not attempts.active(), "its exit was reported"
        write_json(run_dir.exit, {**read_json(run_dir.exit), "reported": False})
        node.fences.append(read_json(run_dir.order)["fence"])
        report = recover(run_dir, node.node_file, patience_s=60.0)
        assert report is not None and report["class"] == "ok"
        assert node.reported("exited")["class"] == "ok"
        assert read_json(run_dir.exit)["reported"] is True
    finally:
        node.close()
    assert any(name.endswith("offsets.json") for name in FILES)


def test_a_supervisor_of_another_release_is_reported_with_its_versions(tmp_path: Path) -> None:
    write_run_directories(tmp_path)
    attempts = Attempts(tmp_path, "n1", tmp_path / "node.json")
    run_dir = RunDir(tmp_path / "runs/1/attempt-1")
    attempts._active["f"] = run_dir
    [seen] = attempts.active()
    assert (seen.wire, seen.release) == (None, None), "release 0.1 names none"
    newer = {"state": "later_state", "release": "0.3.0", "wire": "1.2", "more": []}
    write_json(run_dir.supervisor, newer)
    [seen] = attempts.active()
    assert (seen.state, seen.release, seen.wire) == ("running", "0.3.0", "1.2")
