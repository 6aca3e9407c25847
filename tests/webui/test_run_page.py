"""The run page and the overview as the server gives them: right words, right people, few queries, small pages."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest
from django.db import connection
from django.test.utils import CaptureQueriesContext

from orchestrator.runs import services as runs
from orchestrator.runs.models import Run
from orchestrator.telemetry import services as telemetry
from orchestrator.telemetry.services import Lines
from tests import factories
from webui.run_facts import TAB_TITLES
from workers.contracts.points import PointBatch

MOST_QUERIES = 12
MOST_BYTES = 150_000

pytestmark = pytest.mark.django_db


def points(run: Run, steps: range, ranks: int = 2) -> None:
    names = ("loss", "grad_norm", "lr", "tokens_per_s", "mfu", "step_time_s", "data_time_s", "memory/params_bytes")
    for rank in range(ranks):
        values = {name: [1.0] * len(steps) for name in names}
        batch = PointBatch(
            run=str(run.pk),
            attempt=1,
            rank=rank,
            seq=list(steps),
            step=list(steps),
            tokens=[64 * step for step in steps],
            time=[time.time()] * len(steps),
            values=values,
        )
        telemetry.points_store(run=run, attempt=1, batches=[batch])


@pytest.fixture
def run(people: factories.People) -> Run:
    made = factories.run(people.owner, name="a run <b>of</b> mine", devices=2)
    factories.running(made, factories.node("n1"))
    return made


def queries_of(client: Any, url: str) -> tuple[Any, int]:
    with CaptureQueriesContext(connection) as caught:
        response = client.get(url)
    return response, len(caught)


@pytest.mark.parametrize("tab", sorted(TAB_TITLES))
def test_a_long_run_costs_few_queries_and_a_small_page(people: factories.People, run: Run, tab: str) -> None:
    client = factories.client_for(people.owner)
    assert client.get(f"/runs/{run.pk}/?tab={tab}").status_code == 200
    for start in range(1, 4001, 1000):
        points(run, range(start, start + 1000))
    for step in range(0, 4000, 10):
        runs.event_record(
            run=run, type="checkpoint_saved", data={"step": step}, attempt=1, rank=0, origin=f"1/0/{step}"
        )
    lines = [f"a line of some length that tells step {n} and little else, again and again" for n in range(3000)]
    telemetry.logs_store(
        run=run, attempt=1, batches=[(rank, Lines(first_seq=1, time=1e9, lines=lines)) for rank in (0, 1)]
    )
    response, queries = queries_of(client, f"/runs/{run.pk}/?tab={tab}")
    assert response.status_code == 200
    assert queries <= MOST_QUERIES
    assert len(response.content) <= MOST_BYTES


def test_names_are_text_and_never_markup(people: factories.People, run: Run) -> None:
    page = factories.client_for(people.owner).get(f"/runs/{run.pk}/").content.decode()
    assert "a run &lt;b&gt;of&lt;/b&gt; mine" in page and "<b>of</b>" not in page


def test_who_may_see_and_who_may_act(people: factories.People, run: Run) -> None:
    assert b'value="cancel"' in factories.client_for(people.owner).get(f"/runs/{run.pk}/").content
    teammate = factories.client_for(people.teammate)
    assert b'value="cancel"' not in teammate.get(f"/runs/{run.pk}/").content
    refused = teammate.post(f"/runs/{run.pk}/act/", {"action": "cancel"}, follow=True)
    assert b"its owner and operators manage it" in refused.content
    run.refresh_from_db()
    assert run.state == "running"
    stranger = factories.client_for(people.stranger)
    for address in (f"/runs/{run.pk}/", f"/runs/{run.pk}/pulse/"):
        assert stranger.get(address).status_code == 404


def test_actions_do_and_say_it(people: factories.People, run: Run) -> None:
    client = factories.client_for(people.owner)
    answer = client.post(f"/runs/{run.pk}/act/", {"action": "priority", "priority": "7"}, follow=True)
    assert b"Priority is 7 now." in answer.content
    answer = client.post(f"/runs/{run.pk}/act/", {"action": "clone"}, follow=True)
    made = Run.objects.latest("id")
    assert f"This is run {made.pk}, a clone of run {run.pk}.".encode() in answer.content
    client.post(f"/runs/{run.pk}/act/", {"action": "cancel"})
    run.refresh_from_db()
    assert (run.state, run.requested) == ("stopping", "cancel")
    assert client.post(f"/runs/{run.pk}/act/", {"action": "explode"}).status_code == 422
    assert client.get(f"/runs/{run.pk}/act/").status_code == 405


def test_the_pulse_tells_headline_state_and_marks(people: factories.People, run: Run) -> None:
    points(run, range(1, 6))
    runs.event_record(run=run, type="non_finite", data={"step": 3, "what": "loss"}, attempt=1, rank=0, origin="1/0/1")
    answer = factories.client_for(people.owner).get(f"/runs/{run.pk}/pulse/").json()
    assert answer["run_state"] == "running" and answer["part"] == "25.0"
    assert answer["sentence"].startswith("Step 5 of 20, loss 1.000")
    assert [mark["text"] for mark in answer["marks"]] == ["Not a finite number: loss on rank 0 at step 3"]


def test_the_page_carries_where_its_data_stand_and_no_foreign_address(people: factories.People, run: Run) -> None:
    points(run, range(1, 6))
    page = factories.client_for(people.owner).get(f"/runs/{run.pk}/").content.decode()
    source = json.loads(page.split('<script id="run-source" type="application/json">')[1].split("</script>")[0])
    assert source["after"] > 0 and source["epoch"] and source["per_step"]["tokens"] == 4 * 64
    assert "//" not in page.replace('xmlns="http://www.w3.org/2000/svg"', "").replace("://testserver", "")


def test_logs_fold_ranks_and_show_the_first_cause(people: factories.People, run: Run) -> None:
    for rank in (0, 1):
        lines = Lines(first_seq=1, time=1e9, lines=[f"[rank{rank}]: loading", f"[rank{rank}]: ValueError: odd <head>"])
        telemetry.logs_store(run=run, attempt=1, batches=[(rank, lines)])
    client = factories.client_for(people.owner)
    page = client.get(f"/runs/{run.pk}/?tab=logs").content.decode()
    assert page.count("loading") == 1 and "0–1" in page and "odd &lt;head&gt;" in page and "First error" in page
    assert "No line matches" in client.get(f"/runs/{run.pk}/?tab=logs&q=absent").content.decode()


def test_the_overview_tells_the_fleet_in_one_line(people: factories.People, run: Run, live_redis: str) -> None:
    page = factories.client_for(people.owner).get("/").content.decode()
    assert "0 of 4 devices busy, 1 run, nothing waits." in page
    assert "My runs" in page and f'data-run="{run.pk}"' in page
    nobody = factories.client_for(people.stranger).get("/").content.decode()
    assert "Runs in flight" in nobody and "Nothing runs" in nobody and "mine" not in nobody


def test_an_empty_place_says_what_to_do_first(people: factories.People, live_redis: str) -> None:
    assert "Add a node" in factories.client_for(people.admin).get("/").content.decode()
    assert "Ask an operator" in factories.client_for(people.owner).get("/").content.decode()


def test_the_gallery_shows_everything(people: factories.People) -> None:
    page = factories.client_for(people.stranger).get("/gallery/").content.decode()
    for word in ("queued", "cancelled", "drained", "Waits for 4 devices", "Failed at step 12", "Not finite"):
        assert word in page
