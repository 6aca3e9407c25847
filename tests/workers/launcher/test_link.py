"""A supervisor's connection after its node joins again: new seal, and the outbox rewinds."""

from __future__ import annotations

import os
import time

import redis

from tests.workers.launcher.harness import Node
from workers.contracts.wire import envelope, names
from workers.contracts.wire.node_messages import LaunchOrder
from workers.launcher.rundir import read_json, write_json
from workers.launcher.shipping import redis_link
from workers.launcher.shipping.redis_link import Link


def test_a_node_that_joined_anew_seals_with_its_new_secret(tmp_path, redis_url: str) -> None:
    node = Node(tmp_path / "home", redis_url, "again", ear=False)
    link = Link(node.node_file, LaunchOrder.model_validate(node.order(["true"])))
    with redis.Redis.from_url(redis_url, decode_responses=True) as client:
        client.flushall()
        assert link.telemetry([{"stream": "logs"}])
        before, secret = link.generation, os.urandom(32)
        link.report("running", {"ranks": 2})
        write_json(node.node_file, {**read_json(node.node_file), "secret": secret.hex()})
        assert link.flush() and link.telemetry([{"stream": "logs"}])
        assert link.generation > before, "the outbox rewinds when the generation rises"
        for stream, kind in (
            (names.TELEMETRY, names.KIND_TELEMETRY),
            (names.REPORTS, names.KIND_REPORT),
        ):
            _, fields = client.xrevrange(stream, count=1)[0]
            envelope.open_envelope(secret, fields[names.FIELD_MESSAGE], kind=kind, now=time.time())
        client.flushall()


def test_messages_go_to_the_streams_that_the_control_plane_reads(
    tmp_path, redis_url: str, monkeypatch
) -> None:
    """Release 0.1 reads shared streams, and publishes no versions."""
    monkeypatch.setattr(redis_link, "_CONTROL_EVERY_S", 0.0)
    node = Node(tmp_path / "home", redis_url, "n", ear=False)
    link = Link(node.node_file, LaunchOrder.model_validate(node.order(["true"])))

    def lengths() -> list[int]:
        streams = (names.REPORTS, names.TELEMETRY)
        streams += (names.reports_stream("n"), names.telemetry_stream("n"))
        return [client.xlen(stream) for stream in streams]

    def send() -> None:
        link.report("running", {"ranks": 1})
        while not (link.flush() and link.telemetry([{"stream": "logs"}])):
            time.sleep(0.01)

    with redis.Redis.from_url(redis_url, decode_responses=True) as client:
        client.flushall()
        send()
        assert lengths() == [1, 1, 0, 0]
        before = link.generation
        client.set(names.CONTROL, "{}")
        send()
        assert lengths() == [1, 1, 1, 1]
        assert link.generation > before, "the outbox rewinds, so that the order is kept"
        client.delete(names.CONTROL)
        send()
        assert lengths() == [2, 2, 1, 1]
        client.flushall()
