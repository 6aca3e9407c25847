"""REST: history of a node and of the fleet, idle devices, and energy by group."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import pytest

from orchestrator.background_jobs.models import UsageDay
from orchestrator.background_jobs.usage import measure
from orchestrator.device_history import recorder
from orchestrator.device_history.gathering import Gathering
from orchestrator.runs import services as runs
from orchestrator.scheduling.accounting.held import held_within
from orchestrator.scheduling.models import Allocation
from tests import factories
from tests.conftest import FakeClock
from workers.contracts.wire.node_messages import DeviceSample, NodeSample

pytestmark = pytest.mark.django_db
START = datetime(2026, 3, 9, 12, tzinfo=UTC)


@pytest.fixture(autouse=True)
def recorded(monkeypatch: pytest.MonkeyPatch, clock: FakeClock, people: factories.People) -> None:
    """The owner's run holds both GPUs of a node for 15 minutes; the second one does no work."""
    gathering = Gathering()
    monkeypatch.setattr(recorder, "gathering", gathering)
    node = factories.node("orion", devices=2)
    node.devices.update(kind="gpu")
    question = runs.experiment_create(owner=people.owner, name="question")
    run = factories.run(people.owner, name="secret plan", devices=2)
    type(run).objects.filter(pk=run.pk).update(experiment=question)
    attempt = factories.running(run, node)
    for device in node.devices.order_by("index"):
        Allocation.objects.create(attempt=attempt, device=device, rank=device.index, created=START)
    write = recorder.Recorder(held_within)
    for minute in range(15):
        begin = START + timedelta(minutes=minute)
        for part in range(2):
            gathering.add(
                node=node.pk,
                time=begin.timestamp() + 30 * part,
                samples=[
                    DeviceSample(index=0, utilization=0.8, power_w=500.0),
                    DeviceSample(index=1, utilization=0.0, power_w=100.0),
                ],
                machine=NodeSample(received_bytes=minute * 60_000 + part * 30_000),
            )
        clock.time = begin + timedelta(seconds=66)
        write.write_due()


def test_a_node_has_its_devices_and_its_network(people: factories.People) -> None:
    client = factories.api(people.stranger)
    answer = client.get("/api/v1/nodes/orion/history?points=1440")
    assert answer.status_code == 200, answer.content
    body = answer.json()
    assert body["step_s"] == 60 and len(body["times"]) == 1440
    first, second = body["devices"]
    assert set(first["series"]) == {"utilization", "power_w"}  # no other readings
    at = body["times"].index(int(START.timestamp()) + 120)
    assert first["series"]["utilization"]["max"][at] == 0.8
    assert second["series"]["power_w"]["mean"][at] == 100
    assert body["series"]["received_bytes_per_s"]["mean"][at] == 1000
    assert body["series"].keys() == {"received_bytes_per_s"}
    coarse = client.get("/api/v1/nodes/orion/history?points=10&from=2026-03-02T00:00:00Z").json()
    assert coarse["step_s"] % 900 == 0 and len(coarse["times"]) <= 10


def test_the_fleet_has_sums_and_its_energy(people: factories.People) -> None:
    client = factories.api(people.stranger)
    body = client.get("/api/v1/fleet/history?points=1440").json()
    at = body["times"].index(int(START.timestamp()) + 120)
    names = ("devices", "allocated", "busy", "idle", "power_w", "measured")
    assert [body[name][at] for name in names] == [2, 2, 1, 1, 600, 2]
    assert body["utilization"][at] == pytest.approx(0.4, abs=1e-3)
    assert body["energy_kwh"] == pytest.approx(0.15, rel=1e-3)
    assert client.get("/api/v1/fleet/history?pool=none").status_code == 404
    wrong = client.get("/api/v1/fleet/history?from=2030-01-01T00:00:00Z")
    assert wrong.status_code == 422 and "is not before" in wrong.content.decode()


def test_idle_devices_hide_runs_from_strangers(people: factories.People) -> None:
    for viewer, name in ((people.teammate, "secret plan"), (people.stranger, None)):
        body = factories.api(viewer).get("/api/v1/fleet/idle-devices").json()
        (row,) = body["items"]
        assert (row["node"], row["index"]) == ("orion", 1)
        assert (row["run"] and row["run"]["name"]) == name
        assert body["device_s"] == row["idle_s"] == pytest.approx(15 * 60 + 6)


def test_energy_is_summed_by_group_with_pue_and_co2(people: factories.People) -> None:
    client = factories.api(people.teammate)
    for by, key in (("team", "lab"), ("person", "owner"), ("experiment", "question")):
        body = client.get(f"/api/v1/fleet/energy?by={by}").json()
        (row,) = body["items"]
        assert (row["key"], row["device_s"], row["idle_s"]) == (key, 1800, 900)
        assert row["energy_kwh"] == pytest.approx(0.15 * 1.58)
        assert row["co2_kg"] == pytest.approx(0.15 * 1.58 * 0.445)
        assert row["utilization"] == pytest.approx(0.4)
    assert client.get("/api/v1/fleet/energy?by=color").status_code == 422
    hidden = factories.api(people.stranger).get("/api/v1/fleet/energy").json()
    assert hidden["items"] == [] and hidden["total"]["energy_kwh"] is None


def test_usage_reports_have_the_energy_of_their_days(
    people: factories.People, clock: FakeClock
) -> None:
    measure.measure_due(now=clock.now(), dry_run=False, renew=lambda: None)
    assert UsageDay.objects.get().energy_j == pytest.approx(15 * 60 * 600)
    client = factories.api(people.owner)
    for by in ("team", "experiment", "day"):
        row = client.get(f"/api/v1/usage?from=2026-03-09&to=2026-03-09&by={by}").json()["items"][0]
        assert row["energy_kwh"] == pytest.approx(0.15 * 1.58, rel=1e-4), by
        assert row["co2_kg"] == pytest.approx(0.15 * 1.58 * 0.445, rel=1e-4)
