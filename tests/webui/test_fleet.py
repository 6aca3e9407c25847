"""Fleet and node pages: allocations, visibility, draining, and a join token that works."""

from __future__ import annotations

import html
import re
from datetime import UTC, datetime, timedelta

import pytest

from orchestrator.accounts.models import User
from orchestrator.fleet import services as fleet
from orchestrator.fleet.models import Node
from orchestrator.runs.models import Run
from orchestrator.scheduling.models import Allocation
from tests import factories
from webui.charts.gantt import Bar, DeviceAllocation, Lane, gantt, lanes
from workers.contracts.wire import envelope
from workers.contracts.wire.node_messages import DeviceSample

NOON = datetime(2026, 1, 1, 12, tzinfo=UTC)


def hold(run: Run, node: Node) -> None:
    """The run starts on the node's first devices, as the scheduler would write it."""
    attempt = factories.running(run, node)
    for rank, device in enumerate(node.devices.order_by("index")[: run.devices]):
        Allocation.objects.create(attempt=attempt, device=device, rank=rank)


def page_of(user: User, address: str) -> str:
    answer = factories.client_for(user).get(address)
    assert answer.status_code == 200, answer.content[:300]
    return re.sub(r"\s+", " ", html.unescape(answer.content.decode()))


@pytest.mark.django_db
def test_an_empty_fleet_names_the_next_action(people: factories.People) -> None:
    assert "No node has joined yet" in page_of(people.owner, "/fleet/")
    assert "/join-node/" not in page_of(people.owner, "/fleet/")
    assert "/join-node/" in page_of(people.operator, "/fleet/")


@pytest.mark.django_db
def test_allocations_hide_runs_from_strangers(people: factories.People) -> None:
    node = factories.node("orion", devices=4)
    run = factories.run(people.owner, name="secret plan", devices=2)
    hold(run, node)
    for viewer, knows in ((people.teammate, True), (people.stranger, False)):
        for address in ("/fleet/", "/fleet/orion/"):
            page = page_of(viewer, address)
            assert ("secret plan" in page) is knows, (viewer, address)
            assert (f"/runs/{run.pk}/" in page) is knows
        assert "1 node, 4 devices: 2 allocated, 2 free; all nodes are up." in page_of(
            viewer, "/fleet/"
        )
        assert "The node is up; 2 of 4 devices allocated." in page_of(viewer, "/fleet/orion/")
    assert "another user's run" in page_of(people.stranger, "/fleet/")


@pytest.mark.django_db
def test_metrics_and_problems_are_shown(owner: User) -> None:
    factories.node("orion", devices=2)
    known = {
        "utilization": 0.5,
        "memory_used_bytes": 2**30,
        "power_w": 310,
        "temperature_c": 61,
        "processes": [7],
    }
    sample = DeviceSample(index=0, **known).to_dict()
    Node.objects.update(sample={"time": 1.0, "devices": [sample]})
    page = page_of(owner, "/fleet/orion/")
    assert "50%" in page and "1 GiB of 4 GiB" in page and "310 W" in page and "61 °C" in page
    assert "not Orrery" in page  # a process on a device without a lease
    Node.objects.update(health="silent")
    assert "orion is silent" in page_of(owner, "/fleet/")


@pytest.mark.django_db
def test_draining_shows_its_consequences_first(people: factories.People) -> None:
    node = factories.node("orion", devices=4)
    run = factories.run(people.owner, devices=2)
    hold(run, node)
    page = page_of(people.operator, "/fleet/orion/drain/")
    assert f"Run {run.pk} {run.name}" in page and "has no other device in service" in page
    node.refresh_from_db()
    assert not node.drained  # looking changes nothing
    client = factories.client_for(people.operator)
    answer = client.post("/fleet/orion/drain/", {"reason": "new fan"}, follow=True)
    assert "drained (new fan), no new runs start here" in answer.content.decode()
    node.refresh_from_db()
    assert node.drained and node.drain_reason == "new fan"
    client.post("/fleet/orion/undrain/")
    node.refresh_from_db()
    assert not node.drained


@pytest.mark.django_db
def test_operators_only_drain_and_let_join(owner: User) -> None:
    factories.node("orion")
    client = factories.client_for(owner)
    for method, address in (
        ("get", "/fleet/orion/drain/"),
        ("post", "/fleet/orion/drain/"),
        ("post", "/fleet/orion/undrain/"),
        ("get", "/join-node/"),
        ("post", "/join-node/"),
    ):
        answer = getattr(client, method)(address)
        assert answer.status_code == 403 and "operator" in answer.content.decode(), address
    assert not Node.objects.filter(drained=True).exists()
    assert client.get("/fleet/elsewhere/").status_code == 404


@pytest.mark.django_db
def test_the_token_shown_once_lets_one_node_join(operator: User) -> None:
    client = factories.client_for(operator)
    answer = client.post("/join-node/", {"pool": "gpus"})
    assert "no-store" in answer.headers["Cache-Control"]
    command = re.search(r'<pre id="join-command">(.*?)</pre>', answer.content.decode())
    assert command is not None
    words = html.unescape(command[1]).split()
    assert words[:4] == ["python", "-m", "workers.agent", "--redis"]
    assert "://orrery-join:" in words[4] and "password for join requests" in answer.content.decode()
    token = words[words.index("--join") + 1]
    assert token not in client.get("/join-node/").content.decode()
    request = envelope.join_request(token, name="new")
    node, _ = fleet.node_joined(request=request, inventory=factories.inventory("new"))
    assert node.pool.name == "gpus"
    assert "1 node, 4 devices: 0 allocated" in page_of(operator, "/fleet/")


def test_bars_are_cut_to_the_window_and_sorted() -> None:
    def held(device: int, start_h: float, end_h: float | None) -> DeviceAllocation:
        end = None if end_h is None else NOON - timedelta(hours=end_h)
        return DeviceAllocation(device, 1, "a", "running", NOON - timedelta(hours=start_h), end)

    drawn = gantt(
        [held(1, 1, None), held(1, 9, 5), held(1, 9, 7), held(2, 2, 1.999), held(3, 1, 0)],
        [1, 2],
        since=NOON - timedelta(hours=6),
        until=NOON,
    )
    first, second = drawn.bars[1]
    # began before the window
    assert (first.left, first.width) == (0, pytest.approx(100 / 6, abs=0.01))
    assert (second.left, second.width) == (
        pytest.approx(500 / 6, abs=0.01),
        pytest.approx(100 / 6, abs=0.01),
    )
    assert drawn.bars[2][0].width == 0.3  # a moment is still seen
    assert drawn.share == pytest.approx((2 * 3600 + 3.6) / (2 * 6 * 3600))
    assert [tick.label for tick in drawn.ticks] == ["07:00", "08:00", "09:00", "10:00", "11:00"]


@pytest.mark.parametrize("window", ["1h", "24h", "7d", "nonsense"])
@pytest.mark.django_db
def test_every_window_is_drawn(owner: User, window: str) -> None:
    hold(factories.run(owner, name="wide"), factories.node("orion"))
    page = page_of(owner, f"/fleet/?window={window}")
    assert 'class="gantt-bar' in page and "active" in page


def test_bars_of_a_gang_on_neighboring_devices_are_joined() -> None:
    def bar(attempt: int) -> Bar:
        return Bar(DeviceAllocation(0, attempt, "a", "running", NOON, None, attempt), 0, 50, 60)

    rows = [[bar(1)], [bar(1)], [bar(2)], [bar(1)]]
    placed = [(one.held.attempt, lane) for one, lane in lanes(rows)]
    assert placed == [(1, Lane(0, 50, 2)), (2, Lane(50, 25, 1)), (1, Lane(75, 25, 1))]
    assert lanes([]) == []


@pytest.mark.django_db
def test_a_large_fleet_has_pages_and_filters(
    people: factories.People, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("webui.views.fleet.fleet_list.NODES", 2)
    monkeypatch.setattr("webui.views.fleet.allocation_chart.DEVICE_ROWS", 4)
    nodes = [factories.node(name, devices=4) for name in ("a1", "a2", "b1")]
    hold(factories.run(people.owner, name="wide", devices=4), nodes[0])
    Node.objects.filter(name="b1").update(health="lost", drained=True)
    page = page_of(people.owner, "/fleet/")
    assert re.findall(r'data-node="(\w+)"', page) == ["a1", "a2"]
    assert "3 nodes, 12 devices: 4 allocated, 8 free; b1 is lost" in page
    assert "b1 is drained" in page and "page 1 of 2" in page
    assert page.count('class="gantt-bar') == 1 and 'a1 <span class="muted">× 4</span>' in page
    for query, names in {
        "page=2": ["b1"],
        "page=99": ["b1"],
        "page=x&show=nonsense": ["a1", "a2"],
        "show=problems": ["b1"],
        "show=free": ["a2"],
        "q=B": ["b1"],
        "pool=elsewhere": [],
    }.items():
        page = page_of(people.owner, f"/fleet/?{query}")
        assert re.findall(r'data-node="(\w+)"', page) == names, query
    assert "No node matches" in page
    page = page_of(people.owner, "/fleet/?q=a&show=free&window=1h")
    assert "?q=a&window=1h" in page and "?q=a&show=free&window=24h" in page


@pytest.mark.django_db
def test_many_troubled_nodes_are_counted(owner: User) -> None:
    for number in range(5):
        factories.node(f"n{number}")
    Node.objects.exclude(name="n0").update(health="silent")
    assert "4 nodes are silent" in page_of(owner, "/fleet/")


@pytest.mark.django_db
def test_the_overview_of_a_large_fleet_is_a_map_of_nodes(
    people: factories.People, live_redis: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("webui.views.overview.overview_devices.MARKS", 3)
    run = factories.run(people.owner, name="secret plan", devices=2)
    hold(run, factories.node("orion", devices=4))
    factories.node("lost1", devices=4)
    Node.objects.filter(name="lost1").update(health="lost")
    page = page_of(people.stranger, "/")
    assert 'class="cell busy" tabindex="-1" href="/fleet/orion/" style="--fill:50%"' in page
    assert "orion: 2 of 4 devices busy" in page and "lost1: 0 of 4 devices busy; lost" in page
    assert "secret plan" not in page and "2 nodes with 8 devices" in page
    run.refresh_from_db()
    # the attempt began before the run's last step
    run.attempts.update(started=datetime.fromtimestamp(0, UTC))
    run.summary = {"time": 1.0, "step_time_s": 0.1}
    run.save()
    assert "orion: 2 of 4 devices busy; with a run that may hang" in page_of(people.owner, "/")
