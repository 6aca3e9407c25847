"""The wire of the previous release: this release reads its messages, and it could read ours."""

from __future__ import annotations

import json
from typing import Any

import jsonschema
import pytest

from orchestrator.telemetry.writing.decoding import Telemetry
from tests.workers.contracts.previous_release import KEYS, MESSAGES, SCHEMAS, Recorded
from workers.contracts.base import Contract
from workers.contracts.wire import envelope, node_messages, versions
from workers.contracts.wire.field_versions import message_for
from workers.contracts.wire.node_messages import (
    AttemptReport,
    AttemptSeen,
    ControlOrder,
    DeviceInfo,
    DeviceSample,
    Heartbeat,
    KeepOrder,
    LaunchOrder,
    NodeInventory,
    NodeSample,
    ProbeOrder,
)
from workers.contracts.wire.points import PointBatch, ReportedEvent

KINDS = {
    "heartbeat": Heartbeat,
    "launch": LaunchOrder,
    "control": ControlOrder,
    "keep": KeepOrder,
    "probe": ProbeOrder,
    "report": AttemptReport,
    "telemetry": Telemetry,
}
SEALED = [message for kind, message in MESSAGES.items() if kind.split("/")[-2:][0] in KINDS]
PEER = versions.FIRST


def contract_of(message: Recorded) -> type[Contract]:
    parts = [part for part in message.kind.split("/") if part != "celery"]
    return KINDS[parts[0]]


@pytest.mark.parametrize("message", SEALED, ids=lambda message: message.kind)
def test_a_recorded_message_is_read_and_nothing_of_it_is_lost(message: Recorded) -> None:
    body = message.body()
    read = contract_of(message).from_dict(body)
    if contract_of(message) is not Telemetry:  # it is compared part by part
        written = read.to_dict()
        assert {name: written.get(name) for name in body} == body


def test_every_kind_of_message_is_recorded() -> None:
    reports = node_messages.AttemptReport.model_fields["type"].annotation.__args__
    expected = {f"report/{kind}" for kind in reports}
    expected |= {f"telemetry/{stream}" for stream in ("points", "events", "logs")}
    expected |= {"join", "join reply", "heartbeat", "heartbeat/attempts", "heartbeat/inventory"}
    expected |= {"launch", "launch/resume", "control", "keep", "probe", "rendezvous"}
    expected |= {"frame/event", "frame/points", "frame/state", "frame/node", "celery/launch"}
    assert expected <= set(MESSAGES)


def test_unknown_fields_are_ignored_in_every_message() -> None:
    for message in SEALED:
        body = add_unknown(message.body())
        assert contract_of(message).from_dict(body), message.kind
    text = MESSAGES["control"].text.partition(".")[2]
    payload = json.dumps({**json.loads(text), "later": 1})
    assert envelope.peek("0" * 64 + "." + payload) == ("control", "n1")


def add_unknown(data: Any, *, inside: bool = True) -> Any:
    """The data with an unknown field in every object, except in free-form ones."""
    if isinstance(data, list):
        return [add_unknown(item) for item in data]
    if not isinstance(data, dict):
        return data
    free = ("data", "values", "spec", "plan", "env", "versions")
    return {
        **{key: value if key in free else add_unknown(value) for key, value in data.items()},
        "later_field": {"any": 1},
    }


def ours() -> list[Contract]:
    """One message of each kind with every field that this release can send."""
    device = DeviceInfo(
        index=0, kind="gpu", name="gpu", memory_bytes=1, uuid="u", cores=[0], problem="XID 79"
    )
    inventory = NodeInventory(
        name="n1",
        address="a",
        hostname="h",
        cores=1,
        memory_bytes=1,
        devices=[device],
        isolation={"method": "uids", "detail": "a user per owner"},
        broker_user="own",
        topology="row-1/rack-3",
    )
    sample = DeviceSample(index=0, utilization=0.5, throttled="heat", processes=[1])
    seen = AttemptSeen(
        fence="0b0e", state="running", release=versions.RELEASE, wire=str(versions.WIRE)
    )
    owner = {"id": 1, "name": "ada"}
    newer = {
        "owner": owner,
        "reads": ["1"],
        "lease_s": 30.0,
        "secrets": {"KEY": "encrypted"},
        "preflight": {"least_share": 0.5},
        "device_memory_bytes": 2**30,
        "rendezvous": {"host": "10.0.0.1", "node": "n1"},
        "store": {"url": "s3://bucket/runs"},
        "program": {"packed": "", "fingerprint": "0" * 64, "folder": "/data/code"},
    }
    launch = LaunchOrder.from_dict({**MESSAGES["launch/resume"].body(), **newer})
    return [
        inventory,
        Heartbeat(
            node="n1",
            time=1.0,
            samples=[sample],
            attempts=[seen],
            inventory=inventory,
            release=versions.RELEASE,
            wire=str(versions.WIRE),
            dropped_orders=2,
            machine=NodeSample(cpu_utilization=0.5),
        ),
        launch,
        ControlOrder(attempt_id="1", fence="0b0e", action="cancel"),
        ProbeOrder(request="q", fences=["0b0e"], inventory=True, measure_s=5.0),
        KeepOrder(source="runs/1/a", target="runs/2/a", owner=owner),
        AttemptReport(attempt_id="1", fence="0b0e", node="n1", seq=1, time=1.0, type="running"),
        PointBatch.from_dict(part("telemetry/points")["batch"]),
        ReportedEvent.from_dict(part("telemetry/events")["events"][0]),
    ]


def part(kind: str) -> dict[str, Any]:
    stream = kind.split("/")[1]
    batches = MESSAGES[kind].body()["batches"]
    return next(batch for batch in batches if batch["stream"] == stream)


@pytest.mark.parametrize("message", ours(), ids=lambda message: type(message).__name__)
def test_the_previous_release_accepts_our_messages(message: Contract) -> None:
    name = type(message).__name__.replace("ReportedEvent", "RunEvent")
    data = json.loads(json.dumps(message_for(message, PEER)))
    jsonschema.validate(data, SCHEMAS[name])
    every_field = set(type(message).model_fields)
    assert every_field <= message.to_dict().keys() | {
        "plan",
        "env",
        "max_seconds",
        "secrets",
        "preflight",
        "trials",
        "rank",
    } | ({"data", "samples"} if name in ("AttemptReport",) else set()) | {
        "versions",
        "shared_dir",
        "collect",
    }, "this test covers every field"


def test_a_schema_of_the_previous_release_refuses_newer_fields() -> None:
    """Otherwise the test before would prove nothing."""
    for message in ours()[:3]:
        with pytest.raises(jsonschema.ValidationError):
            jsonschema.validate(message.to_dict(), SCHEMAS[type(message).__name__])


def test_the_recorded_join_reply_completes_the_recorded_secret() -> None:
    request, reply = MESSAGES["join"].body()["request"], json.loads(MESSAGES["join reply"].text)
    assert envelope.join_accept(KEYS["token"], request, reply) == (
        "n1",
        bytes.fromhex(KEYS["secret"]),
    )
    more = {**reply, "release": versions.RELEASE, "wire": str(versions.WIRE)}
    assert envelope.join_accept(KEYS["token"], request, more)[0] == "n1"
