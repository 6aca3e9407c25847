"""Maintenance and reservations: reasons, notice, overlaps, page and REST."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest
from django.db import connection
from django.test.utils import CaptureQueriesContext
from hypothesis import given, settings
from hypothesis import strategies as st

from orchestrator.accounts.models import AuditEntry, Team, User
from orchestrator.common import clock
from orchestrator.common.errors import Refusal
from orchestrator.fleet.models import Pool
from orchestrator.runs.models import Attempt, RunEvent
from orchestrator.scheduling import services
from orchestrator.scheduling.models import NodeWindow
from orchestrator.scheduling.ordering.decayed_usage import DecayedUsage
from orchestrator.scheduling.placement.capacity import Window
from orchestrator.scheduling.policy import place
from orchestrator.scheduling.preemption.windows import clear
from orchestrator.scheduling.reserved import windows
from orchestrator.scheduling.simulation.estimates import Policy, estimate_starts
from tests import factories
from tests.orchestrator.scheduling.conftest import Broker, FakeNode
from tests.orchestrator.scheduling.test_policy import NOW, T, node, placed, reason, run
from tests.orchestrator.scheduling.test_preemption import running

HOUR = 3600.0
LATER = Window(T + HOUR, T + 2 * HOUR)


def test_only_runs_that_end_before_a_window_start_on_its_nodes() -> None:
    nodes = [node("a", 2, windows=(LATER,))]
    for fields, fits in (
        ({"max_seconds": HOUR}, True),
        ({"max_seconds": HOUR + 1}, False),
        ({"expected_s": 2800.0}, True),  # with a margin of 25%
        ({"expected_s": 2900.0}, False),
        ({}, False),
    ):
        assert bool(placed(place([run(1, 2, **fields)], nodes, NOW))) is fits, fields
    decision = place([run(1, 2, max_seconds=2 * HOUR)], nodes, NOW)
    assert decision.waits[0].reason == (
        "Waiting for 2 devices: a is reserved for maintenance from 2026-01-01 01:00 to 2026-01-01 "
        "02:00 UTC, and the run may last 2.0 h. It starts after that, or now with a time limit "
        "that ends before 2026-01-01 01:00 UTC."
    )
    assert decision.waits[0].may_start == T + 2 * HOUR
    assert "the run has no time limit" in place([run(1, 2)], nodes, NOW).waits[0].reason


def test_a_reservation_admits_only_its_team() -> None:
    now = Window(T - 10, T + HOUR, "vision")
    nodes = [node("a", 2, windows=(now,)), node("b", 2)]
    queue = [run(1, 2, team="speech"), run(2, 2, team="vision", waited=0.5)]
    assert placed(place(queue, nodes, NOW)) == {1: [("b", (0, 1))], 2: [("a", (0, 1))]}
    assert not placed(place(queue[:1], nodes[:1], NOW))
    # a run without team is not of the team "" of maintenance
    closed = [node("a", 2, windows=(replace(now, team=""),))]
    assert not placed(place([run(1, 2)], closed, NOW))


def test_windows_leave_other_nodes_and_other_runs_alone() -> None:
    nodes = [node("a", 2, windows=(LATER,)), node("b", 2), node("c", 2, pool="other")]
    queue = [run(1, 4), run(2, 2, waited=0.9), run(3, 2, pool="other")]
    decision = place(queue, nodes, NOW)
    assert placed(decision) == {2: [("b", (0, 1))], 3: [("c", (0, 1))]}
    assert "a is reserved for maintenance" in reason(decision, 1)


def test_a_blocked_run_reserves_no_devices_that_others_could_use() -> None:
    nodes = [node("a", 2, windows=(LATER,))]
    queue = [run(1, 2, waited=60, max_seconds=2 * HOUR), run(2, 2, max_seconds=HOUR)]
    assert list(placed(place(queue, nodes, NOW))) == [2]


def test_the_work_of_a_pass_grows_with_the_nodes_or_the_runs_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of a window of a large pool, not with both: counted, because times vary."""
    calls = 0
    original = Window.excludes

    def counted(self: Window, team: str, start: float, lasts_s: float) -> bool:
        nonlocal calls
        calls += 1
        return original(self, team, start, lasts_s)

    monkeypatch.setattr(Window, "excludes", counted)
    nodes = [node(f"n{number:03}", 2, windows=(LATER,)) for number in range(200)]
    queue = [run(number, 4, waited=60, team="ab"[number % 2]) for number in range(300)]
    decision = place(queue, nodes, NOW, estimated=2)
    assert len(decision.waits) == 300
    assert all(wait.may_start is None for wait in decision.waits[2:])
    assert calls < 3000, calls  # 60,000 of a check per run and node


def test_the_start_is_where_devices_are_free_first_after_windows() -> None:
    longer = Window(T + 600, T + 9 * HOUR)
    held = node("b", 2, held={0: 7, 1: 7}, until=T + 2 * HOUR + 60, windows=(LATER,))
    nodes = [node("a", 2, windows=(longer,)), held]
    [wait] = place([run(1, 2, max_seconds=2 * HOUR)], nodes, NOW).waits
    assert wait.may_start == T + 2 * HOUR + 60  # on b; a is free now, and closed for longer


def test_a_run_reserves_no_node_that_it_may_not_use() -> None:
    # "a" is free first, but closed for the first run
    nodes = [
        node("a", 2, windows=(LATER,)),
        node("b", 2, held={0: 7, 1: 7}, until=T + 900),
    ]
    queue = [run(1, 2, waited=60, max_seconds=2 * HOUR), run(2, 2, max_seconds=HOUR)]
    decision = place(queue, nodes, NOW)
    assert placed(decision) == {2: [("a", (0, 1))]}
    assert decision.waits[0].may_start == T + 900
    later = [node("a", 2, windows=(LATER,)), node("b", 2, held={0: 7, 1: 7}, until=T + 3 * HOUR)]
    queue = [run(1, 4, waited=60, max_seconds=2 * HOUR), run(2, 2, max_seconds=HOUR)]
    decision = place(queue, later, NOW)
    assert placed(decision) == {2: [("a", (0, 1))]}
    assert decision.waits[0].may_start == T + 3 * HOUR


def test_a_current_window_has_no_advice_about_limits() -> None:
    now = Window(T - 60, T + HOUR)
    assert place([run(1, 2)], [node("a", 2, windows=(now,))], NOW).waits[0].reason == (
        "Waiting for 2 devices: a is reserved for maintenance until 2026-01-01 01:00 UTC. It may "
        "start after that."
    )


times = st.integers(-5, 20).map(lambda number: number * 600.0)


@settings(max_examples=100, deadline=None)
@given(
    st.lists(st.tuples(times, times, st.sampled_from(["", "x"])), min_size=1, max_size=4),
    st.lists(
        st.tuples(st.integers(1, 6), st.none() | st.integers(60, 9000), st.sampled_from("xy")),
        min_size=1,
        max_size=8,
    ),
)
def test_no_placement_may_last_into_a_window(
    spans: list[tuple[float, float, str]], runs: list[tuple[int, int | None, str]]
) -> None:
    reserved = tuple(Window(T + min(a, b), T + max(a, b) + 1, team) for a, b, team in sorted(spans))
    nodes = [node("a", 4, windows=reserved), node("b", 4, windows=reserved[:1]), node("c", 2)]
    by_name = {each.name: each for each in nodes}
    queue = [
        run(i, size, max_seconds=limit, team=team, waited=30.0)
        for i, (size, limit, team) in enumerate(runs)
    ]
    for placement in place(queue, nodes, NOW).placements:
        item = queue[placement.run]
        for share in placement.shares:
            assert not any(
                window.excludes(item.team, T, item.longest_s)
                for window in by_name[share.node].windows
            )


def test_estimates_wait_for_the_end_of_a_window() -> None:
    nodes = [node("a", 2, windows=(LATER,))]
    policy = Policy({}, {}, {}, DecayedUsage())
    starts = estimate_starts([run(1, 2, max_seconds=2 * HOUR)], nodes, T, policy=policy, ends={})
    assert starts[1].start == T + 2 * HOUR


@pytest.mark.django_db
def test_runs_get_a_notice_before_a_window_begins(
    broker: Broker, people: factories.People, owner: User, operator: User
) -> None:
    fake = FakeNode(factories.node("n1", devices=2))
    other = FakeNode(factories.node("n2", devices=2))
    stopped = running(owner, fake, devices=2)
    other_run = running(owner, other, devices=2)
    now = clock.now()
    start = now + timedelta(seconds=10)
    windows.window_create(
        by=operator, pool="default", nodes=["n1"], start=start, end=start + timedelta(hours=1)
    )
    assert clear(now=start - timedelta(seconds=60)) == 0
    assert clear(now=start - timedelta(seconds=20)) == 1
    assert clear(now=start) == 0  # one notice
    attempt = Attempt.objects.get(run=stopped)
    assert attempt.requested == "preempt" and Attempt.objects.get(run=other_run).requested == ""
    event = RunEvent.objects.get(run=stopped, type="preempted")
    assert event.data["reason"].startswith("Its nodes are reserved for maintenance from ")
    fake.exited(attempt, "preempted", step=6)
    services.tick()
    stopped.refresh_from_db()
    assert (stopped.state, stopped.budgets_used) == ("queued", {})
    assert "n1 is reserved for maintenance" in stopped.wait_reason


@pytest.mark.django_db
def test_the_teams_runs_stay_and_a_deleted_window_frees_its_nodes(
    broker: Broker, people: factories.People, owner: User, operator: User
) -> None:
    fake = FakeNode(factories.node("n1", devices=4))
    mine = running(owner, fake, devices=2)
    now = clock.now()
    window = windows.window_create(
        by=operator, pool="default", nodes=[], start=now, end=now + timedelta(hours=1), team="lab"
    )
    assert clear(now=now) == 0
    assert Attempt.objects.get(run=mine).requested == ""
    item = factories.run(factories.user("other"), devices=2)
    services.tick()
    item.refresh_from_db()
    assert "n1 is reserved for team lab" in item.wait_reason
    windows.window_delete(window=window, by=operator)
    services.tick()
    item.refresh_from_db()
    assert item.state == "starting"


@pytest.mark.django_db
def test_windows_of_a_removed_node_alone_end(
    broker: Broker, people: factories.People, owner: User, operator: User
) -> None:
    fake, gone = FakeNode(factories.node("n1", devices=2)), factories.node("n2", devices=2)
    item = running(owner, fake, devices=2)
    now = clock.now()
    times: dict[str, Any] = {"start": now, "end": now + timedelta(hours=1)}
    alone = windows.window_create(by=operator, pool="default", nodes=["n2"], **times)
    later: dict[str, Any] = {"start": now + timedelta(days=1), "end": now + timedelta(days=2)}
    both = windows.window_create(by=operator, pool="default", nodes=["n1", "n2"], **later)
    services.node_remove(node=gone, by=operator)
    assert not NodeWindow.objects.filter(pk=alone.pk).exists()
    assert [node.name for node in both.nodes.all()] == ["n1"]
    # not a window of the whole pool
    assert clear(now=now) == 0
    assert Attempt.objects.get(run=item).requested == ""
    assert list(windows.of_nodes(now)) == [fake.node.pk]
    assert AuditEntry.objects.get(action="window.delete").target == f"window:{alone.pk}"


@pytest.mark.django_db
def test_the_queries_of_a_notice_do_not_grow_with_the_windows(
    broker: Broker, people: factories.People, owner: User, operator: User
) -> None:
    now, counts = clock.now(), []
    for number in range(1, 4):
        name = f"n{number}"
        running(owner, FakeNode(factories.node(name, devices=2)), devices=2)
        for team in ("lab", "lab"):
            windows.window_create(
                by=operator,
                pool="default",
                nodes=[name],
                start=now,
                end=now + timedelta(hours=1),
                team=team,
            )
        with CaptureQueriesContext(connection) as queries:
            assert clear(now=now) == 0
        counts.append(len(queries))
    assert len(set(counts)) == 1 and counts[0] <= 5, counts


@pytest.mark.django_db
def test_impossible_windows_are_refused(
    people: factories.People, owner: User, operator: User
) -> None:
    factories.node("n1", devices=2)
    Team.objects.create(name="empty")
    Pool.objects.create(name="bare")
    now = clock.now()
    good: dict[str, Any] = {
        "by": operator,
        "pool": "default",
        "nodes": ["n1"],
        "start": now + timedelta(hours=1),
        "end": now + timedelta(hours=2),
    }
    for change, message in (
        ({"end": now + timedelta(minutes=30)}, "ends before it starts"),
        ({"start": now - timedelta(hours=2), "end": now - timedelta(hours=1)}, "has passed"),
        ({"end": now + timedelta(days=99)}, "at most 90"),
        ({"nodes": ["n1", "n9"]}, "no node 'n9'"),
        ({"pool": "none"}, "no pool 'none'"),
        ({"pool": "bare", "nodes": []}, "has no nodes"),
        ({"team": "empty"}, "has no members"),
        ({"team": "unknown"}, "no team 'unknown'"),
        ({"by": owner}, "operator is required"),
    ):
        with pytest.raises(Refusal) as refused:
            windows.window_create(**(good | change))
        text = f"{refused.value.detail} {refused.value.errors}"
        assert message in text, (change, text)
    windows.window_create(**good)
    windows.window_create(**good)  # twice the same is not a conflict
    with pytest.raises(Refusal, match="are reserved for maintenance from"):
        windows.window_create(**good, team="lab")
    with pytest.raises(Refusal, match="are reserved for maintenance from"):
        windows.window_create(**(good | {"nodes": [], "team": "lab"}))


@pytest.mark.django_db
def test_page_and_rest(people: factories.People, owner: User, operator: User) -> None:
    factories.node("n1", devices=2)
    page, rest = factories.client_for(operator), factories.api(operator)
    assert "Nothing planned" in page.get("/windows/").content.decode()
    typed = {"pool": "default", "nodes": "n1", "reason": "new cables", "team": ""}
    times = {"start": "2099-01-01T10:00", "end": "2099-01-01T12:00"}
    refused = page.post("/windows/", {**typed, "start": "soon", "end": "later"})
    assert (
        refused.status_code == 422 and "&#x27;soon&#x27; is not a time" in refused.content.decode()
    )
    assert page.post("/windows/", {**typed, **times}).status_code == 302
    text = page.get("/windows/").content.decode()
    assert '<span class="visually-hidden">Actions</span>' in text and "<th></th>" not in text
    assert "1 window is planned." in text and "2099-01-01 10:00" in text and "new cables" in text
    shown = factories.client_for(owner).get("/windows/").content.decode()
    assert "new cables" in shown and "Reserve nodes" not in shown

    [row] = rest.get("/api/v1/windows").json()["items"]
    assert (row["nodes"], row["team"], row["start"]) == (["n1"], "", "2099-01-01T10:00:00Z")
    body = {"pool": "default", "start": "2098-01-01T10:00:00Z", "end": "2098-01-02T10:00:00Z"}
    made = rest.post("/api/v1/windows", body, content_type="application/json")
    assert made.status_code == 201 and made.json()["nodes"] == []
    assert rest.delete(f"/api/v1/windows/{row['id']}").status_code == 204
    assert page.post(f"/windows/{made.json()['id']}/delete/").status_code == 302
    assert not NodeWindow.objects.exists()
    assert AuditEntry.objects.filter(action__startswith="window.").count() == 4
