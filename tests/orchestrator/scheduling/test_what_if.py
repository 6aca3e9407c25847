"""What-if on the live queue: added nodes, a paused team, refusals, page and REST."""

from __future__ import annotations

from dataclasses import replace

import pytest

from orchestrator.accounts.models import User
from orchestrator.runs.models import Attempt, Run
from orchestrator.scheduling import services
from orchestrator.scheduling.placement.capacity import Window
from orchestrator.scheduling.queue.what_if import Result
from orchestrator.scheduling.simulation.what_if import Change, applied
from tests import factories
from tests.orchestrator.scheduling.conftest import Broker, FakeNode
from tests.orchestrator.scheduling.test_policy import node, run
from tests.orchestrator.scheduling.test_preemption import running
from webui.views.queue.what_if import _sentence

JSON = "application/json"


def test_new_nodes_are_like_the_largest_and_free() -> None:
    nodes = [node("a", 2, held={0: 9}), node("new-1", 4, held={0: 9}), node("c", 8, pool="other")]
    _, views = applied(Change("default", add_nodes=2), [], nodes)
    assert views[:3] == nodes
    assert [(view.name, view.pool, len(view.slots)) for view in views[3:]] == [
        ("new-2", "default", 4),
        ("new-3", "default", 4),
    ]
    assert all(slot.run is None for view in views[3:] for slot in view.slots)
    with pytest.raises(ValueError, match="pool empty has no node"):
        applied(Change("empty", add_nodes=1), [], nodes)


def test_new_nodes_have_the_windows_of_the_pool_alone() -> None:
    own, whole = Window(0.0, 9.0), Window(5.0, 9.0, "lab", whole_pool=True)
    _, views = applied(Change("default", add_nodes=1), [], [node("a", 2, windows=(own, whole))])
    assert views[1].windows == (whole,)


def test_a_paused_team_neither_waits_nor_holds_devices() -> None:
    held = node("a", 3, held={0: 8, 1: 9})
    teams = ("speech", "vision", "")
    slots = tuple(replace(slot, team=team) for slot, team in zip(held.slots, teams, strict=True))
    nodes = [replace(held, slots=slots)]
    queue = [run(1, 1, team="vision"), run(2, 1, team="speech"), run(3, 1)]
    runs, [view] = applied(Change(pause_team="vision"), queue, nodes)
    assert [each.run for each in runs] == [2, 3]
    assert [slot.run for slot in view.slots] == [8, None, None]


def test_starts_within_the_same_five_minutes_differ_on_the_page() -> None:
    result = Result(Change("default", 1), [], 2, 2, 1870.0, 1750.0, 0)
    assert "29 min 10 s instead of 31 min 10 s" in _sentence(result)


@pytest.mark.django_db
def test_page_and_rest_compare_starts(
    broker: Broker, people: factories.People, owner: User, operator: User
) -> None:
    fake = FakeNode(factories.node("n1", devices=2))
    limit = {"devices": 2, "resources": {"max_seconds": 3600}}
    running(factories.user("other"), fake, **limit)  # its predicted end has passed
    waits = [factories.run(owner, **limit) for _ in range(2)]
    services.tick()
    rest, url = factories.api(operator), "/api/v1/queue/what-if"
    answer = rest.post(url, {"pool": "default", "add_nodes": 1}, content_type=JSON).json()
    assert (answer["waiting"], answer["compared"], answer["starting"]) == (2, 2, 2)
    assert answer["mean_after_s"] < answer["mean_before_s"]
    assert {row["run"] for row in answer["runs"]} == {str(each.pk) for each in waits}
    paused = rest.post(url, {"pause_team": "lab"}, content_type=JSON).json()
    assert [row["after_s"] for row in paused["runs"]] == [None, None]
    for body, field in (
        ({}, "add_nodes"),
        ({"add_nodes": 1, "pool": "none"}, "pool"),
        ({"pause_team": "none"}, "pause_team"),
    ):
        refused = rest.post(url, body, content_type=JSON)
        assert refused.status_code == 422 and refused.json()["errors"][0]["field"] == field
    page = factories.client_for(operator)
    assert "When would waiting runs start" in page.get("/simulator/what-if/").content.decode()
    text = page.post("/simulator/what-if/", {"pool": "default", "add_nodes": "1"}).content.decode()
    assert "2 waiting runs would start in" in text and "sooner" in text
    refused_page = page.post("/simulator/what-if/", {"pool": "default", "add_nodes": "many"})
    assert refused_page.status_code == 422
    # nothing has changed
    assert Run.objects.filter(state="queued").count() == 2 and Attempt.objects.count() == 1
