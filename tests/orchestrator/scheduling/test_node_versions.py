"""Nodes of other releases: the previous one works, others get no new work and say why."""

from __future__ import annotations

import json
import re
import time
from typing import Any

import pytest

from orchestrator.accounts.models import User
from orchestrator.common import live
from orchestrator.fleet import selectors as fleet
from orchestrator.fleet import services as fleet_services
from orchestrator.fleet.models import JoinToken, Node
from orchestrator.runs.models import Attempt, Checkpoint, Run, RunEvent
from orchestrator.scheduling import dispatch, selectors, services
from orchestrator.scheduling.periodic_checks import reap
from orchestrator.scheduling.reports import control_versions, heartbeat_handler
from orchestrator.scheduling.reports.missing_attempts import presence
from orchestrator.scheduling.reports.silence import NewHeartbeat
from orchestrator.telemetry.writing.decoding import Entry, EntryDecoder
from tests import factories
from tests.orchestrator.scheduling.conftest import Broker, FakeNode
from tests.workers.contracts.previous_release import MESSAGES, SCHEMAS
from workers.contracts.wire import envelope, names, versions
from workers.contracts.wire.versions import WIRE, Skew, WireVersion

pytestmark = pytest.mark.django_db

OLDER = str(WireVersion(WIRE.major, WIRE.minor - 1))
NEWER = str(WireVersion(WIRE.major, WIRE.minor + 1))
REFUSED = str(WireVersion(WIRE.major, WIRE.minor + 2))


def recorded(kind: str, attempt: Attempt | None = None) -> dict[str, Any]:
    """The body of a recorded message, for this attempt."""
    body = MESSAGES[kind].body()
    if attempt is not None:
        text = json.dumps(body)
        text = text.replace(str(body["fence"]), str(attempt.fence))
        body = json.loads(text) | {"attempt_id": str(attempt.pk)}
        if "run" in body:
            body = _of_run(body, attempt)
        if str(body.get("data", {}).get("path", "")).startswith("runs/"):
            tail = body["data"]["path"].split("/", 2)[2]
            body["data"]["path"] = f"runs/{attempt.run_id}/{tail}"
    return body


def _of_run(body: Any, attempt: Attempt) -> Any:
    if isinstance(body, dict):
        changed = {key: _of_run(value, attempt) for key, value in body.items()}
        return changed | ({"run": str(attempt.run_id)} if "run" in changed else {})
    return [_of_run(item, attempt) for item in body] if isinstance(body, list) else body


def beat(node: Node, body: dict[str, Any]) -> bool:
    text = FakeNode(node).sealed(names.KIND_HEARTBEAT, body).encode()
    return heartbeat_handler.apply([NewHeartbeat(node.name, time.time(), text)])


def body_of(node: Node, wire: str | None, **more: Any) -> dict[str, Any]:
    stated = {} if wire is None else {"release": "9.9", "wire": wire}
    return {"node": node.name, "time": time.time(), **stated, **more}


def placed(owner: User, *, devices: int = 1) -> Attempt:
    run = factories.run(owner, devices=devices)
    services.tick()
    return Attempt.objects.select_related("run").get(run=run)


def test_a_run_on_a_node_of_the_previous_release(broker: Broker, owner: User) -> None:
    node = factories.node("n1", devices=2)
    for kind in ("heartbeat", "heartbeat/inventory"):
        body = recorded(kind) | {"time": time.time()}
        assert services.report(FakeNode(node).sealed(names.KIND_HEARTBEAT, body))
    node.refresh_from_db()
    assert (node.release, node.wire, fleet.compatibility(node).skew) == ("0.1", "1.0", Skew.MINOR)
    assert len(fleet.serialize_node(node)["devices"]) == 2
    attempt = placed(owner, devices=2)
    [(kind, order)] = broker.orders(node)
    assert kind == "launch" and "lease_s" not in order
    assert order.keys() <= SCHEMAS["LaunchOrder"]["properties"].keys()
    for kind in ("launching", "running", "checkpoint", "event", "exited"):
        body = recorded(f"report/{kind}", attempt)
        assert services.report(FakeNode(node).sealed(names.KIND_REPORT, body)), kind
    assert Run.objects.get().state in ("finished", "queued", "failed")
    attempt.refresh_from_db()
    assert attempt.state == "exited"
    assert Checkpoint.objects.filter(run=attempt.run).exists()
    assert RunEvent.objects.filter(run=attempt.run, type="hang").exists()


@pytest.mark.parametrize("kind", ["telemetry/points", "telemetry/events", "telemetry/logs"])
def test_telemetry_of_the_previous_release_is_decoded(
    broker: Broker, owner: User, kind: str
) -> None:
    node = factories.node("n1", devices=2)
    attempt = placed(owner, devices=2)
    text = FakeNode(node).sealed(names.KIND_TELEMETRY, recorded(kind, attempt))
    fields = {names.FIELD_NODE.encode(): b"n1", names.FIELD_MESSAGE.encode(): text.encode()}
    decoder = EntryDecoder()
    entry = Entry(f"{int(time.time() * 1000)}-0".encode(), fields)
    incoming, _ = decoder.decode([entry], time.time())
    assert not decoder.dropped and incoming.run_ids() == {attempt.run_id}


@pytest.mark.parametrize(
    ("wire", "skew"),
    [
        (None, "minor"),
        (OLDER, "minor"),
        (str(WIRE), "same"),
        (NEWER, "minor"),
        (REFUSED, "refused"),
        ("2.0", "refused"),
        ("junk", "refused"),
    ],
)
def test_a_node_gets_work_unless_its_version_is_refused(
    broker: Broker, owner: User, wire: str | None, skew: str
) -> None:
    node = factories.node("n1")
    beat(node, body_of(node, wire))
    factories.run(owner)
    services.tick()
    assert Attempt.objects.exists() is (skew != "refused")
    assert bool(broker.orders(node)) is (skew != "refused")
    node = fleet.nodes_visible_to(user=owner).get()
    shown = fleet.serialize_node(node)["compatibility"]
    assert shown["skew"] == skew and bool(shown["message"] and shown["hint"]) is (skew != "same")
    health = selectors.health()
    assert health["versions"]["nodes"][skew] == 1
    assert any("refuses" in text for text in health["troubles"]) is (skew == "refused")
    if skew == "refused":
        assert "refused version" in Run.objects.get().wait_reason


def test_attempts_on_a_node_that_becomes_incompatible_continue(
    broker: Broker, owner: User, settings: Any
) -> None:
    node = factories.node("n1", devices=2)
    attempt = placed(owner)
    FakeNode(node).beat(attempt)
    FakeNode(node).send_report(attempt, "running")
    broker.orders(node)
    # a body that this release cannot read, from an agent that does not name the attempt
    unreadable = body_of(node, REFUSED, samples="other", attempts={}, inventory=[])
    for _ in range(2):
        beat(node, unreadable)
    fence = str(attempt.fence)
    assert presence.missing_for(fence, "n1") == 0.0
    assert reap() == 0
    node.refresh_from_db()
    attempt.refresh_from_db()
    assert (node.health, attempt.state, node.wire) == ("up", "running", REFUSED)
    assert not dispatch.launch(attempt) and not broker.orders(node)
    assert dispatch.control(attempt, "cancel")
    assert [order["action"] for _, order in broker.orders(node)] == ["cancel"]
    assert [text for _, text in live.frames_after("fleet", 0) if '"type":"node"' in text]
    # an upgraded agent gets work again
    beat(node, body_of(node, str(WIRE), attempts=[{"fence": fence, "state": "running"}]))
    factories.run(owner)
    services.tick()
    assert [kind for kind, _ in broker.orders(node)] == ["launch"]


def test_older_supervisors_are_listed(broker: Broker, owner: User) -> None:
    node = factories.node("n1", devices=2)
    attempt = placed(owner)
    seen = {"fence": str(attempt.fence), "state": "running"}
    beat(node, body_of(node, str(WIRE), attempts=[seen, {**seen, "wire": str(WIRE)}]))
    node = fleet.nodes_visible_to(user=owner).get()
    [old] = fleet.serialize_node(node)["supervisors"]
    assert old == {"release": "0.1", "wire": "1.0", "attempts": 1, "skew": "minor"}


def join(name: str, **stated: str) -> tuple[str, dict[str, Any]]:
    """Send a join request with these versions; `(the token's id, request)`."""
    token = fleet_services.join_token_create(by=None)
    request = envelope.join_request(token, name=name)
    body = {"request": request, "inventory": factories.inventory(name).to_dict(), **stated}
    token_id, key = envelope.join_token_parts(token)
    assert services.report(
        envelope.seal(key, names.KIND_JOIN, body, ttl_s=60, now=time.time(), node=token_id)
    )
    return token_id, request


def test_a_join_exchanges_versions_and_refuses_others(broker: Broker) -> None:
    token, request = join("n1", release="9.9", wire=REFUSED)
    reply = json.loads(broker.client.lpop(names.join_reply_key(request["nonce_a"])))
    assert reply["code"] == names.INCOMPATIBLE and "release 9.9" in reply["refused"]
    assert not Node.objects.exists() and JoinToken.objects.get(pk=token).used is None
    _, request = join("n2", release="9.8", wire=NEWER)
    reply = json.loads(broker.client.lpop(names.join_reply_key(request["nonce_a"])))
    assert (reply["release"], reply["wire"]) == (versions.RELEASE, str(WIRE))
    assert (Node.objects.get().release, Node.objects.get().wire) == ("9.8", NEWER)
    join("n3")
    assert Node.objects.get(name="n3").wire == "1.0", "the previous release names no version"


def test_the_scheduler_publishes_its_versions(broker: Broker) -> None:
    control_versions.publish()
    stated = json.loads(broker.client.get(names.CONTROL))
    assert stated == {"release": versions.RELEASE, "wire": str(WIRE)}
    assert 0 < broker.client.ttl(names.CONTROL) <= names.CONTROL_TTL_S


def test_pages_and_metrics_show_other_versions(
    broker: Broker, people: factories.People, client: Any
) -> None:
    old, new, same = (factories.node(name) for name in ("older", "newer", "same"))
    beat(old, body_of(old, OLDER))
    beat(new, body_of(new, REFUSED))
    beat(same, body_of(same, str(WIRE)))
    browser = factories.client_for(people.owner)
    page = browser.get("/fleet/").content.decode()
    assert "newer gets no new runs because of its release" in page
    assert "1 node runs another release" in page
    for badge in ("release refused", "release 9.9"):
        assert len(re.findall(rf">\s*{re.escape(badge)}\s*<", page)) == 1
    refused = browser.get("/fleet/newer/").content.decode()
    for text in (
        "Upgrade the control plane, one minor version at a time",
        f"wire protocol {REFUSED}",
    ):
        assert text in refused
    assert "Its running attempts continue" in refused
    assert "until then they work together" in browser.get("/fleet/older/").content.decode()
    assert "versions-title" not in browser.get("/fleet/same/").content.decode()
    lines = client.get("/metrics").content.decode()
    for skew in ("same", "minor", "refused"):
        assert f'orrery_node_versions{{skew="{skew}"}} 1.0' in lines
