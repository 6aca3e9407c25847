"""The page "Fleet over time" and the history of a node: readings, idle devices, energy."""

from __future__ import annotations

import html
import json
import math
import re
from datetime import UTC, datetime, timedelta

import numpy as np
import pytest

from orchestrator.accounts.models import User
from orchestrator.background_jobs.usage import measure
from orchestrator.device_history.gathering import NodeMinute
from orchestrator.device_history.series import DEVICE, NODE
from orchestrator.device_history.writing import Writer
from orchestrator.fleet.models import Cordon
from orchestrator.runs import services as runs
from orchestrator.runs.models import Attempt, Run
from orchestrator.scheduling.accounting.held import held_within
from orchestrator.scheduling.models import Allocation
from tests import factories
from webui.charts.device_history import Columns, Reading, bytes_per_s, curve_track, heat_track
from webui.presentation import formatting

NAN = math.nan


def page_of(user: User, address: str) -> str:
    answer = factories.client_for(user).get(address)
    assert answer.status_code == 200, answer.content[:300]
    return re.sub(r"\s+", " ", html.unescape(answer.content.decode()))


def record(people: factories.People, *, power: float | None, minutes: int = 20) -> Run:
    """The owner's run holds two devices for the last minutes; the second does no work."""
    node = factories.node("orion", devices=2)
    node.devices.update(kind="gpu")
    end = int(datetime.now(UTC).timestamp()) // 60 * 60
    start = end - 60 * minutes
    run = factories.run(people.owner, name="secret plan", devices=2)
    attempt = factories.running(run, node)
    for device in node.devices.order_by("index"):
        Allocation.objects.create(
            attempt=attempt,
            device=device,
            rank=device.index,
            created=datetime.fromtimestamp(start, UTC),
        )
    writer = Writer()
    devices = np.full((2, len(DEVICE), 3), np.nan, np.float32)
    devices[:, 0] = [[0.7, 0.8, 0.9], [0, 0, 0]]
    devices[:, 2] = NAN if power is None else power
    other = np.full((len(NODE), 3), np.nan, np.float32)
    other[NODE.index("received_bytes_per_s")] = [1e6, 2e6, 3e6]
    for minute in range(start, end, 60):
        writer.write(minute, {node.pk: NodeMinute((0, 1), devices, other)}, held_within)
    return run


@pytest.mark.django_db
def test_an_empty_fleet_has_designed_pages(owner: User) -> None:
    page = page_of(owner, "/fleet-over-time/")
    assert "No readings in the last 24 hours." in page
    assert "No idle devices" in page and "No run used a device" in page
    factories.node("orion")
    page = page_of(owner, "/fleet/orion/?window=90d")
    assert "No readings in this window" in page and "No power is measured" not in page


@pytest.mark.django_db
def test_the_fleet_page_shows_idle_devices_and_energy(people: factories.People) -> None:
    run = record(people, power=300.0)
    page = page_of(people.teammate, "/fleet-over-time/?window=1h&by=person")
    assert "the mean utilization was 40%" in page and "One allocated device is idle now." in page
    assert "orion device 1" in page and "orion device 0" not in page
    assert f"{run.pk} secret plan" in page and "0.333 idle device-hours in all" in page
    # 600 W for 20 min, times 1.58; at 445 g per kWh
    assert "0.316 kWh" in page and "0.141 kg" in page
    stranger = page_of(people.stranger, "/fleet-over-time/?window=1h&by=person")
    assert "orion device 1" in stranger and "another user's run" in stranger
    assert "secret plan" not in stranger and "No run used a device" in stranger
    measure.measure_due(now=datetime.now(UTC), dry_run=False, renew=lambda: None)
    usage = page_of(people.teammate, "/account/usage/?by=person")
    assert "they used 0.316 kWh, about 0.141 kg of CO2" in usage
    source = re.search(r'id="fleet-source" type="application/json">(.*?)</script>', page)
    assert source is not None
    curves = json.loads(source[1])["curves"]
    assert set(curves["idle"]["y"]) == {1.0} and set(curves["power_w"]["y"]) == {600.0}
    assert len(curves["devices"]["x"]) == 20


@pytest.mark.django_db
def test_unknown_power_has_no_energy(people: factories.People) -> None:
    record(people, power=None, minutes=2)
    page = page_of(people.owner, "/fleet-over-time/?window=1h")
    assert "No power was measured in this period, so energy and CO2 are unknown." in page
    assert "kWh</td>" not in page
    assert "No power is measured on this node" in page_of(people.owner, "/fleet/orion/?window=1h")


@pytest.mark.django_db
def test_a_node_aligns_readings_allocations_and_events(people: factories.People) -> None:
    run = record(people, power=300.0)
    node = run.attempts.get().allocations.first().device.node
    now = datetime.now(UTC)
    Cordon.objects.create(
        node=node, cause="operator", reason="new fan", created=now - timedelta(minutes=9)
    )
    Attempt.objects.update(exit_class="hang", ended=now - timedelta(minutes=5), state="exited")
    runs.event_record(run=run, type="hang", data={})
    page = page_of(people.teammate, "/fleet/orion/?window=1h")
    for text in (
        "Utilization",
        "Power",
        "Network, received",
        "0 to 3 MB/s",
        "Each column is 1 min",
    ):
        assert text in page, text
    assert "Cordon of the node: new fan" in page
    assert f"Run {run.pk} ended by a hang" in page and "secret plan" in page
    assert "80% (70% to 90%)" in page  # what the pointer reads
    stranger = page_of(people.stranger, "/fleet/orion/history/?window=1h")
    assert "Another user's run ended by a hang" in stranger
    assert "secret plan" not in stranger and f"/runs/{run.pk}/" not in stranger
    assert factories.client_for(people.owner).get("/fleet/none/history/").status_code == 404


def test_tracks_leave_gaps_and_merge_equal_cells() -> None:
    columns = Columns(start=0, step_s=900, count=5)
    row = Reading("device 0", [0, 0, NAN, 0.5, 1], [0, 0, NAN, 0.5, 1], [0, 0, NAN, 0.5, 1])
    track = heat_track("use", "Use", [row], columns, format=formatting.percent, high=1.0)
    assert track is not None
    assert dict(track.paths) == {"0": "M0 0h2v1h-2z", "4": "M3 0h1v1h-1z", "8": "M4 0h1v1h-1z"}
    assert track.cells["text"][0] == ["0%", "0%", None, "50%", "100%"]
    assert track.cells["places"][4] == "01:00"
    curve = curve_track("use", "Use", row, columns, format=formatting.percent, hue="mfu")
    assert curve is not None
    assert dict(curve.paths)["line"] == "M0.5 100.0L1.5 100.0M3.5 50.0L4.5 0.0"
    empty = Reading("device 0", [NAN] * 5, [NAN] * 5, [NAN] * 5)
    assert heat_track("use", "Use", [empty], columns, format=formatting.percent) is None
    assert curve_track("u", "U", empty, columns, format=formatting.percent, hue="mfu") is None


def test_rates_have_decimal_units() -> None:
    texts = [bytes_per_s(value) for value in (0, 12, 1500, 12.5e6, 3e9)]
    assert texts == ["0 B/s", "12 B/s", "1.50 kB/s", "12.5 MB/s", "3 GB/s"]


@pytest.mark.django_db
def test_the_gallery_shows_strips_and_curves(owner: User) -> None:
    page = page_of(owner, "/gallery/")
    assert "A node over time" in page and "Cordon of device 2: new fan" in page
    assert page.count('class="curve-line"') == 1
