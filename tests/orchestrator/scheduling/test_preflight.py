"""Preflight probes: requested for large gangs, recorded per node, cordoned below the record."""

from __future__ import annotations

import uuid
from typing import Any

import pytest

from orchestrator.accounts.models import User
from orchestrator.config.env.variables import Env
from orchestrator.fleet import cordoning, cordons, probe_history, suspect_links
from orchestrator.fleet.models import Cordon, Node, ProbeResult
from orchestrator.runs.models import Attempt, Run, RunEvent
from orchestrator.scheduling import dispatch, services
from tests import factories
from tests.orchestrator.scheduling.conftest import Broker, FakeNode
from workers.contracts.wire.maintenance.preflight import PreflightReport, ProbeValue, Shortfall

pytestmark = pytest.mark.django_db

RATES = {"matmul": 100e9, "memory": 10e9}


@pytest.fixture(autouse=True)
def few_devices(settings: Any) -> None:
    settings.ENV = Env(preflight_devices=2)


def report(rate: float = 1.0, *, low: tuple[int, ...] = (), node_low: bool = False) -> Any:
    values = [
        ProbeValue(measure=measure, device=device, value=value * rate)
        for measure, value in RATES.items()
        for device in (0, 1)
    ]
    values.append(ProbeValue(measure="all_reduce_node", ranks=2, value=1e9))
    shortfalls = [
        Shortfall(
            measure="matmul", device=device, value=1e9, reference=1e11, message=f"slow {device}"
        )
        for device in low
    ]
    if node_low:
        shortfalls.append(Shortfall(measure="all_reduce_node", value=1.0, message="slow link"))
    return PreflightReport(values=values, shortfalls=shortfalls, seconds=2.0, ranks=2)


def recorded(node: Node, times: int = 3, rate: float = 1.0) -> None:
    for run in range(times):
        probe_history.record(
            node=node, run=uuid.uuid4().int >> 70, attempt=run + 1, report=report(rate)
        )


def placed(owner: User, **more: Any) -> Attempt:
    run = factories.run(owner, devices=2, **more)
    services.tick()
    return Attempt.objects.select_related("run").get(run=run)


def failed_probe(node: Node, attempt: Attempt, **low: Any) -> None:
    fake = FakeNode(node)
    data = report(**low).to_dict()
    assert fake.send_report(attempt, "event", type="preflight", data=data)
    assert fake.exited(attempt, "infrastructure", cause="preflight", reason="Preflight failed.")


def test_only_large_gangs_are_probed_against_the_nodes_own_record(
    broker: Broker, owner: User
) -> None:
    node = factories.node("n1", devices=4)
    orders = []
    small = factories.run(owner)
    services.tick()
    recorded(node, 2)
    large = placed(owner)
    recorded(node, 1, rate=3.0)
    dispatch.launch(large)
    for kind, body in broker.orders(node):
        if kind == "launch":
            orders.append((body["run"], body.get("preflight")))
    first, second, again = orders
    assert first == (str(small.pk), None)
    assert second == (str(large.run_id), {"least_share": 0.7, "timeout_s": 180.0, "references": []})
    references = {(item["measure"], item.get("device")): item for item in again[1]["references"]}
    assert references["matmul", 1]["value"] == RATES["matmul"] and len(references) == 5
    assert {item["samples"] for item in references.values()} == {3}


def test_a_failed_probe_uses_no_retry_and_cordons_the_device(broker: Broker, owner: User) -> None:
    node = factories.node("n1", devices=4)
    attempt = placed(owner, retries={"infrastructure": 0})
    data = report(low=(1,)).to_dict()
    fake = FakeNode(node)
    assert fake.send_report(attempt, "event", type="preflight", data=data)
    fake.seq -= 1  # the same report again
    assert fake.send_report(attempt, "event", type="preflight", data=data)
    assert ProbeResult.objects.count() == 5
    assert set(ProbeResult.objects.filter(ok=False).values_list("measure", "device")) == {
        ("matmul", 1)
    }
    assert fake.exited(attempt, "infrastructure", cause="preflight", reason="Preflight failed.")
    run = Run.objects.get(pk=attempt.run_id)
    assert run.state == "queued" and run.budgets_used == {"preflight": 1}
    cordon = Cordon.objects.get()
    assert cordon.device is not None and cordon.device.index == 1 and cordon.cause == "preflight"
    assert cordon.data["shortfalls"][0]["value"] == 1e9 and "slow 1" in cordon.reason
    kinds = RunEvent.objects.filter(run=run).values_list("type", flat=True)
    assert {"preflight", "node_cordoned"} <= set(kinds)
    page = factories.client_for(owner).get("/fleet/n1/").content.decode()
    assert "Preflight probes" in page and "100 GFLOP/s" in page and "Matrix products" in page
    rows = factories.api(owner).get("/api/v1/nodes/n1/preflight-rates").json()["items"]
    assert len(rows) == 5 and {row["run"] for row in rows} == {str(run.pk)}


def test_several_faults_cordon_the_node_and_a_slow_gang_none(broker: Broker, owner: User) -> None:
    nodes = {name: factories.node(name, devices=2) for name in ("n1", "n2", "n3")}
    for low, expected in (({"low": (0, 1)}, None), ({"node_low": True}, None)):
        attempt = placed(owner)
        name = attempt.placement[0]["node"]
        failed_probe(nodes[name], attempt, **low)
        assert [cordon.device for cordon in cordons.open_of(nodes[name])] == [expected]
        Run.objects.filter(pk=attempt.run_id).update(state="cancelled")
    attempt = placed(owner)
    gang = PreflightReport(shortfalls=[Shortfall(measure="all_reduce", message="slow")])
    name = attempt.placement[0]["node"]
    assert FakeNode(nodes[name]).send_report(
        attempt, "event", type="preflight", data=gang.to_dict()
    )
    assert not cordons.open_of(nodes[name])


def test_a_slow_gang_suspects_its_links_until_a_fast_one_clears_them(
    owner: User, clock: Any
) -> None:
    nodes = {name: factories.node(name, devices=2) for name in ("n1", "n2", "n3")}

    def probe(run: int, names: str, rate: float, *, ok: bool = True) -> None:
        clock.advance(60)
        low = [] if ok else [Shortfall(measure="all_reduce", message="slow")]
        value = ProbeValue(measure="all_reduce", ranks=4, value=rate)
        for name in names.split():
            data = PreflightReport(values=[value], shortfalls=low, ranks=4)
            probe_history.record(node=nodes[name], run=run, attempt=1, report=data)

    probe(1, "n1 n2 n3", 9e9)
    probe(2, "n1 n2 n3", 3e9, ok=False)
    assert {name: one.nodes for name, one in suspect_links.suspicions().items()} == {
        "n1": ["n2", "n3"],
        "n2": ["n1", "n3"],
        "n3": ["n1", "n2"],
    }
    probe(3, "n1 n2", 9e9)
    probe(4, "n2 n3", 9e9)
    answer = factories.api(owner).get("/api/v1/nodes/n1").json()
    assert answer["suspect"]["nodes"] == ["n3"] and answer["suspect"]["run"] == "2"
    assert answer["suspect"]["all_reduce_bytes_per_s"] == 3e9 and answer["cordons"] == []
    page = factories.client_for(owner).get("/fleet/n3/").content.decode()
    assert "The link to n1 is suspected" in page and "3 GB/s" in page
    assert factories.api(owner).get("/api/v1/nodes/n2").json()["suspect"] is None
    probe(5, "n1 n3", 9e9)
    assert suspect_links.suspicions() == {}


def test_lifting_a_preflight_cordon_starts_a_new_record(
    owner: User, operator: User, clock: Any
) -> None:
    node = factories.node("n1", devices=2)
    recorded(node, 3)
    assert len(probe_history.references(nodes=["n1"])["n1"]) == 5
    cordoning.cordon_create(node=node, cause=Cordon.Cause.PREFLIGHT, reason="slow")
    clock.advance(60)
    cordoning.node_uncordon(node=node, by=operator)
    clock.advance(60)
    recorded(node, 2, rate=0.5)
    assert probe_history.references(nodes=["n1"])["n1"] == []
    recorded(node, 1, rate=0.5)
    values = {item["value"] for item in probe_history.references(nodes=["n1"])["n1"]}
    assert RATES["matmul"] / 2 in values
