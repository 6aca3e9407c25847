"""Runs list: visibility, filters in the URL, paging, bulk actions, query counts."""

from __future__ import annotations

import re
from typing import Any

import pytest
from django.test import Client

from orchestrator.accounts.models import User
from orchestrator.runs import services
from orchestrator.runs.models import Run
from orchestrator.telemetry import services as telemetry
from tests import factories
from tests.webui.pages import compact
from webui.forms.run_filters import RunFilters
from webui.views.runs.runs import sentence
from workers.contracts.wire.points import PointBatch

pytestmark = pytest.mark.django_db


def shown(client: Client, address: str = "/runs/") -> list[int]:
    """The ids of the rows, in their order."""
    answer = client.get(address)
    assert answer.status_code == 200, answer.content[:500]
    return [int(one) for one in re.findall(r'<tr data-run="(\d+)"', answer.content.decode())]


def test_a_list_needs_a_login() -> None:
    answer = Client().get("/runs/?state=running")
    assert answer.status_code == 302
    assert answer.headers["Location"] == "/login/?next=/runs/%3Fstate%3Drunning"


def test_teams_share_the_list_and_strangers_see_nothing(people: factories.People) -> None:
    mine, shared = factories.run(people.owner), factories.run(people.teammate)
    assert shown(factories.client_for(people.owner)) == [shared.pk, mine.pk]
    assert shown(factories.client_for(people.operator)) == [shared.pk, mine.pk]
    stranger = factories.client_for(people.stranger).get("/runs/")
    assert "data-run=" not in stranger.content.decode()
    assert "No runs yet" in stranger.content.decode()


def test_filters_are_in_the_url(owner: User, teammate: User) -> None:
    first = factories.run(owner, name="warm start", tags=["sweep"])
    second = factories.run(teammate, name="cold start")
    third = factories.external_run(owner)
    services.run_cancel(run=first, by=owner)
    client = factories.client_for(owner)
    for query, ids in {
        "state=cancelled": [first.pk],
        "state=cancelled,queued": [second.pk, first.pk],
        "kind=external": [third.pk],
        "tag=sweep": [first.pk],
        "owner=teammate": [second.pk],
        "owner=me": [third.pk, first.pk],
        "q=START": [second.pk, first.pk],
        "state=nonsense&kind=nonsense&before=nonsense": [third.pk, second.pk, first.pk],
        f"before={second.pk}": [first.pk],
        "q=nothing+of+this": [],
    }.items():
        assert shown(client, f"/runs/?{query}") == ids, query


def test_chips_toggle_and_keep_the_rest_of_the_address() -> None:
    filters = RunFilters.read({"state": "running", "q": "a b", "before": "7"})
    chips = {chip.label: chip for chip in filters.state_chips({"queued": 3, "running": 1})}
    assert chips["running"].on and chips["running"].url == "?q=a+b"
    assert not chips["queued"].on and chips["queued"].url == "?state=running%2Cqueued&q=a+b"
    assert [chip.url for chip in filters.active_chips()] == ["?state=running"]


def test_pages_follow_each_other_without_gap_or_double(owner: User) -> None:
    runs = [factories.run(owner).pk for _ in range(53)]
    client = factories.client_for(owner)
    first = client.get("/runs/").content.decode()
    older = re.search(r'href="(\?before=\d+)" rel="next"', first)
    assert older is not None
    factories.run(owner)  # what comes in meanwhile moves nothing
    assert shown(client, "/runs/" + older[1]) == sorted(runs, reverse=True)[50:]


@pytest.mark.usefixtures("outages_known")
def test_a_full_page_costs_few_queries(owner: User, django_assert_max_num_queries: Any) -> None:
    experiment = services.experiment_create(owner=owner, name="question")
    steps = list(range(1, 1601))
    for number in range(50):
        run = services.run_submit(
            owner=owner,
            name=f"run {number}",
            spec={**factories.spec(), "tags": ["a", "b"]},
            experiment=experiment,
        )
        if number % 5 == 0:
            count = 2 if number else 1600  # short and long series are kept in different tables
            batch = PointBatch(
                run=str(run.pk),
                attempt=1,
                rank=0,
                seq=steps[:count],
                step=steps[:count],
                tokens=steps[:count],
                time=[float(step) for step in steps[:count]],
                values={"loss": [3.0, 2.5] * (count // 2)},
            )
            telemetry.points_store(run=run, attempt=1, batches=[batch])
    client = factories.client_for(owner)
    with django_assert_max_num_queries(20):  # login, session, names and views among them
        answer = client.get("/runs/")
    page = answer.content.decode()
    assert page.count("<tr data-run=") == 50 and len(page) < 150_000
    assert page.count('data-values="3,2.5"') == 9


def test_selected_runs_are_cancelled_and_refusals_listed(owner: User, teammate: User) -> None:
    mine, also, foreign = factories.run(owner), factories.run(owner), factories.run(teammate)
    client = factories.client_for(owner)
    answer = client.post(
        "/runs/bulk/",
        {"run": [mine.pk, also.pk, foreign.pk], "action": "cancel", "next": "/runs/?state=queued"},
        follow=True,
    )
    page = answer.content.decode()
    assert answer.redirect_chain == [("/runs/?state=queued", 302)]
    assert "Cancelling 2 runs." in page
    assert f"{foreign.pk}: Run {foreign.pk} belongs to teammate" in page
    assert dict(Run.objects.values_list("pk", "state")) == {
        mine.pk: "cancelled",
        also.pk: "cancelled",
        foreign.pk: "queued",
    }


def test_a_tag_is_added_to_the_others(owner: User) -> None:
    run = factories.run(owner, tags=["old"])
    client = factories.client_for(owner)
    client.post("/runs/bulk/", {"run": [run.pk], "action": "tag", "tag": " new "})
    assert sorted(run.tags.values_list("name", flat=True)) == ["new", "old"]
    answer = client.post("/runs/bulk/", {"run": [run.pk], "action": "tag", "tag": ""}, follow=True)
    assert "Enter a tag" in answer.content.decode()


def test_bulk_leads_back_to_our_pages_only(owner: User) -> None:
    client = factories.client_for(owner)
    answer = client.post("/runs/bulk/", {"action": "cancel", "next": "https://elsewhere.example/"})
    assert answer.headers["Location"] == "/runs/"
    assert client.post("/runs/bulk/", {"action": "delete"}).status_code == 422
    assert client.get("/runs/bulk/").status_code == 405
    strict = factories.client_for(owner, enforce_csrf_checks=True)
    assert strict.post("/runs/bulk/", {"action": "cancel"}).status_code == 403


def test_the_sentence_counts_what_matters() -> None:
    assert sentence({}) == "No runs yet."
    assert sentence({"running": 1, "queued": 2, "finished": 3, "failed": 1}) == (
        "1 active run, 2 waiting; 3 finished and 1 failed."
    )
    assert sentence({"cancelled": 1200}) == "No active runs; 1,200 cancelled."


def test_runs_are_compared_by_metrics_and_spec_differences(owner: User, stranger: User) -> None:
    one, other = (
        factories.run(
            owner,
            kind="evaluate",
            model="llama-tiny",
            train=None,
            plan={"precision": name},
            evaluate={},
        )
        for name in ("fp32", "bf16")
    )
    for run, perplexity in ((one, 35.0), (other, 36.4)):
        data = {"metrics": {"perplexity": perplexity}, "lines": 3, "model": "tiny"}
        services.event_record(run=run, type="evaluated", attempt=1, rank=0, data=data)
    served = factories.run(
        owner, kind="serve", model="llama-tiny", train=None, plan={}, serve={"api_key": "hush"}
    )
    data = {
        "requests": 9,
        "seconds": 4.0,
        "ttft_s": {"p50": 0.2, "p90": 0.5},
        "tpot_s": {"p50": 0.02, "p90": 0.03},
    }
    services.event_record(run=served, type="served", attempt=1, rank=0, data=data)
    client = factories.client_for(owner)
    chosen = client.post(
        "/runs/bulk/", {"run": [served.pk, other.pk, one.pk], "action": "compare"}, follow=True
    )
    assert chosen.redirect_chain == [(f"/runs/compare/?runs={one.pk},{other.pk},{served.pk}", 302)]
    page = compact(chosen.content.decode())
    cells = (
        r'<td class="num best">35[.0]*</td><td class="num">36\.40?<span '
        r'class="off">\+4\.0%</span></td>'
    )
    assert re.search(cells, page)
    assert (
        "200 ms" in page
        and "Time to first token, p90" in page
        and "plan.<wbr>precision" in page
        and "hush" not in page
    )
    assert factories.client_for(stranger).get(f"/runs/compare/?runs={one.pk}").status_code == 404
    for requested in ("", "x", ",".join(map(str, range(1, 102)))):
        assert client.get("/runs/compare/", {"runs": requested}).status_code == 422


def test_columns_order_groups_and_errors_of_a_query(owner: User) -> None:
    runs = []
    for number, lr in enumerate((1e-2, 1e-4, 1e-3)):
        train = {"steps": 20, "seq_len": 64, "optimizer": {"lr": lr}}
        runs.append(factories.run(owner, name=f"run {number}", train=train).pk)
    client = factories.client_for(owner)
    assert shown(client, "/runs/?sort=lr") == [runs[1], runs[2], runs[0]]
    assert shown(client, "/runs/?query=lr+%3E+1e-3&sort=-lr") == [runs[0]]
    page = client.get("/runs/?columns=lr,plan,unheard&sort=-lr&pin=lr").content.decode()
    assert 'data-label="train.optimizer.lr"' in page and "0.01" in page
    assert 'aria-sort="descending"' in page and "No run has these columns: unheard" in page
    assert "data-live" not in page, "new runs do not belong at the top of an order"
    groups = compact(client.get("/runs/?group=lr,state&columns=lr").content.decode())
    assert "?columns=lr&amp;group=state&amp;query=train.optimizer.lr+%3D+%220.01%22" in groups
    wrong = client.get("/runs/?query=lr+%3E+1+and+stat+%3D+3")
    assert wrong.status_code == 422
    text = wrong.content.decode().replace("&#x27;", "'").replace("&gt;", ">")
    assert "no run has a value 'stat'. Use 'state'.\nlr > 1 and stat = 3\n" in text
    assert f"\n{' ' * 11}^" in text


def test_policy_runs_show_their_reward(owner: User) -> None:
    run = factories.run(owner)
    Run.objects.filter(pk=run.pk).update(
        spec={**run.spec, "train": {"objective": "grpo", "steps": 2}},
        summary={"loss": 0.0123, "reward/mean": 0.75},
    )
    page = compact(factories.client_for(owner).get("/runs/").content.decode())
    assert 'data-label="Reward"' in page and "0.75" in page and "0.0123" not in page


def test_views_are_saved_with_their_columns(owner: User) -> None:
    client = factories.client_for(owner)
    saved = client.post("/runs/views/", {"name": "best", "query": "?sort=-created&before=3"})
    assert saved.headers["Location"] == "/runs/?sort=-created"
    factories.run(owner)
    page = compact(client.get("/runs/?sort=-created").content.decode())
    assert 'class="chip on" href="?sort=-created"' in page and "★ best" in page
    number = re.search(r"/runs/views/(\d+)/delete/", page)
    assert number is not None
    client.post(f"/runs/views/{number[1]}/delete/")
    assert "★ best" not in client.get("/runs/").content.decode()


def test_curves_of_many_runs_come_in_one_response(owner: User, stranger: User) -> None:
    runs = [factories.run(owner) for _ in range(22)]
    for run in runs[:21]:
        batch = PointBatch(
            run=str(run.pk),
            attempt=1,
            rank=0,
            seq=[1, 2],
            step=[1, 2],
            tokens=[8, 16],
            time=[50.0, 60.0],
            values={"custom": [float(run.pk), float("nan")], "loss": [3.0, 2.0]},
        )
        telemetry.points_store(run=run, attempt=1, batches=[batch])
    telemetry.summaries_refresh(limit=30, wait=False)
    ids = ",".join(str(run.pk) for run in runs)
    client = factories.client_for(owner)
    page = compact(client.get(f"/runs/compare/?runs={ids}").content.decode())
    assert "<option>custom</option><option selected>loss</option>" in page
    query = {"runs": ids, "name": "custom", "x": "time"}
    answer = client.get("/runs/compare/curves/", query).json()
    assert len(answer["items"]) == 21 and answer["missing"] == [runs[21].pk]
    assert answer["items"][0] == {
        "run": runs[0].pk,
        "x": [0.0, 10.0],
        "y": [float(runs[0].pk), "NaN"],
        "unit": "",
    }
    assert client.get("/runs/compare/curves/", query | {"x": "mood"}).status_code == 422
    assert factories.client_for(stranger).get("/runs/compare/curves/", query).status_code == 404


def test_widths_of_columns_stay_in_links_and_views(people: factories.People) -> None:
    factories.run(people.owner)
    client = factories.client_for(people.owner)
    page = client.get("/runs/?widths=efficiency:120,model:90").content.decode()
    assert '<input type="hidden" name="widths" value="efficiency:120,model:90">' in page
    assert "widths=efficiency%3A120%2Cmodel%3A90" in page  # chips, orders and the saved address
    client.post("/runs/views/", {"name": "wide", "query": "?widths=model:90"})
    assert "widths=model%3A90" in client.get("/runs/").content.decode()
