"""Queue page: order, reasons with links, estimates, and who may set priorities."""

from __future__ import annotations

import re

import pytest
from django.test import Client

from orchestrator.accounts.models import User
from orchestrator.common import clock
from orchestrator.runs.models import Attempt, Run, RunEvent
from orchestrator.scheduling import services as scheduling
from orchestrator.scheduling.models import DeviceTime
from tests import factories
from tests.webui.test_fleet import hold

pytestmark = pytest.mark.django_db


def order(client: Client) -> list[int]:
    return [
        int(one)
        for one in re.findall(r'<tr data-run="(\d+)"', client.get("/queue/").content.decode())
    ]


def test_the_queue_is_empty(people: factories.People) -> None:
    assert "No waiting runs" in factories.client_for(people.owner).get("/queue/").content.decode()


def test_each_waiting_run_shows_its_reason_and_strangers_see_none(people: factories.People) -> None:
    node = factories.node("orion", devices=2)
    busy = factories.run(people.owner, devices=2)
    hold(busy, node)
    first, big = factories.run(people.owner, devices=2), factories.run(people.teammate, devices=8)
    scheduling.tick()
    client = factories.client_for(people.owner)
    page = client.get("/queue/").content.decode()
    assert order(client) == [first.pk, big.pk]
    assert "2 runs wait for 10 devices in total" in page
    assert f'<a href="/runs/{busy.pk}/">Run {busy.pk}</a> holds 2' in page
    assert "unknown" in page
    # a team mate sees the run but cannot set its priority
    assert page.count('name="priority"') == 1
    assert order(factories.client_for(people.stranger)) == []


def test_priority_moves_a_run_and_is_its_owners_to_set(people: factories.People) -> None:
    first, second = factories.run(people.owner), factories.run(people.teammate)
    client = factories.client_for(people.teammate)
    assert order(client) == [first.pk, second.pk]
    answer = client.post(f"/queue/{second.pk}/priority/", {"priority": "5"}, follow=True)
    assert f"Run {second.pk} now has priority 5." in answer.content.decode()
    assert order(client) == [second.pk, first.pk]
    assert client.post(f"/queue/{first.pk}/priority/", {"priority": "9"}).status_code == 403
    stranger = factories.client_for(people.stranger)
    assert stranger.post(f"/queue/{first.pk}/priority/", {"priority": "9"}).status_code == 404
    wrong = client.post(f"/queue/{second.pk}/priority/", {"priority": "soon"})
    assert wrong.status_code == 422 and "is not an integer" in wrong.content.decode()
    assert dict(Run.objects.values_list("pk", "priority")) == {first.pk: 0, second.pk: 5}
    factories.client_for(people.operator).post(f"/queue/{first.pk}/priority/", {"priority": "7"})
    assert order(client) == [first.pk, second.pk]


def test_a_live_page_fetches_only_its_rows(people: factories.People) -> None:
    factories.run(people.owner)
    answer = factories.client_for(people.owner).get("/queue/", headers={"HX-Request": "true"})
    page = answer.content.decode()
    assert "<html" not in page and 'id="queue-sentence"' in page and "<tr data-run=" in page


def test_a_long_queue_has_pages(owner: User, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("webui.views.queue.queue.SHOWN", 2)
    for number in range(3):
        factories.run(owner, name=f"waits {number}")
    client = factories.client_for(owner)
    page = client.get("/queue/").content.decode()
    assert "waits 1" in page and "waits 2" not in page
    assert "1 more run" in page and "3 runs wait" in page
    assert 'href="?after=2"' in page
    page = client.get("/queue/?after=2").content.decode()
    assert "waits 2" in page and "waits 1" not in page and "3 runs wait" in page
    assert "No runs wait behind this position" in client.get("/queue/?after=9").content.decode()
    assert client.get("/queue/?after=x").status_code == 200


def test_preemptions_show_why_for_whom_and_what_was_lost(people: factories.People) -> None:
    node = factories.node("orion", devices=2)
    now = clock.now()
    for run, cause in (
        (factories.run(people.owner, devices=2, name="preempted one"), {"reason": "R.", "by": 7}),
        (factories.run(people.owner, devices=2, name="paused one"), {}),  # by its owner
    ):
        attempt = factories.running(run, node)
        Attempt.objects.filter(pk=attempt.pk).update(exit_class="preempted", ended=now)
        RunEvent.objects.create(
            run=run, attempt=attempt.number, seq=900, time=now, type="preempted", data=cause
        )
        DeviceTime.objects.create(attempt=attempt, ended=now, allocated=100.0, preemption=90.0)
    page = factories.client_for(people.teammate).get("/queue/").content.decode()
    assert "Preempted in the last 7 days" in page and "1 min 30 s" in page
    assert "preempted one" in page and '<a href="/runs/7/">7</a>' in page
    assert "paused one" not in page
    hidden = factories.client_for(people.stranger).get("/queue/").content.decode()
    assert "Preempted in the last 7 days" not in hidden
