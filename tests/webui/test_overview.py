"""Overview reads what several users share once, and no user gets the part of others."""

from __future__ import annotations

import html
import re
from datetime import timedelta

import pytest
from django.db import connection
from django.test.utils import CaptureQueriesContext
from django.utils import timezone

from orchestrator.accounts.models import Team, User
from orchestrator.runs.models import Run
from orchestrator.telemetry import services as telemetry
from orchestrator.telemetry.services import Lines
from tests import factories
from webui import shared_parts
from webui.shared_parts import SharedByKey
from webui.views.overview import overview

pytestmark = pytest.mark.django_db


@pytest.fixture(autouse=True)
def everything_is_cached(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_parts, "FREE_S", -1.0)
    monkeypatch.setattr(shared_parts, "TIMES", 1e9)
    monkeypatch.setattr(overview, "_shared", SharedByKey())


def test_without_active_runs_the_newest_ones_are_shown(owner: User) -> None:
    run = factories.external_run(owner, name="over")
    factories.node("n1")
    type(run).objects.update(state="finished", ended=run.created, summary={"loss": 1.5})
    page = factories.client_for(owner).get("/").text
    assert "no active runs" in page
    table = page[page.index("The newest ones") :]
    assert f'href="/runs/{run.pk}/"' in table and "loss 1.500" in table


def test_my_runs_are_those_that_i_submitted_also_when_they_ended(
    owner: User, teammate: User
) -> None:
    factories.node("n1")
    for user, name in ((owner, "my-run"), (teammate, "run-of-another")):
        run = factories.external_run(user, name=name)
        type(run).objects.filter(pk=run.pk).update(state="finished", ended=run.created)
    client = factories.client_for(owner)
    everyone, mine = (client.get(f"/?runs={which}").text for which in ("all", "mine"))
    assert "my-run" in everyone and "run-of-another" in everyone

    def active(page: str) -> str:
        return page[page.index('data-part="active"') : page.index('data-part="failed"')]

    assert "my-run" in active(mine) and "run-of-another" not in active(mine)


def test_users_with_the_same_rights_share_what_they_see_and_others_see_nothing(
    owner: User, teammate: User, stranger: User
) -> None:
    factories.running(factories.run(owner, name="secret-run"), factories.node("n1"))
    with CaptureQueriesContext(connection) as first:
        assert "secret-run" in factories.client_for(owner).get("/?runs=all").text
    with CaptureQueriesContext(connection) as second:
        assert "secret-run" in factories.client_for(teammate).get("/?runs=all").text
    assert len(second) < len(first)
    client = factories.client_for(stranger)
    assert "secret-run" not in client.get("/?runs=all").text
    Team.objects.get(members=owner).members.add(stranger)
    assert "secret-run" in client.get("/?runs=all").text
    Team.objects.get(members=owner).members.remove(stranger)
    assert "secret-run" not in client.get("/?runs=all").text


def test_parts_that_were_read_while_rights_changed_are_not_shared(
    owner: User, teammate: User, monkeypatch: pytest.MonkeyPatch
) -> None:
    factories.running(factories.run(teammate, name="secret-run"), factories.node("n1"))
    read = overview.scheduling.overview
    team = Team.objects.get(members=owner)

    def changed(**arguments: object) -> object:
        monkeypatch.setattr(overview.scheduling, "overview", read)
        team.members.remove(owner)
        seen = read(**arguments)  # type: ignore[arg-type]
        return seen

    monkeypatch.setattr(overview.scheduling, "overview", changed)
    assert "secret-run" not in factories.client_for(owner).get("/?runs=all").text
    assert "secret-run" in factories.client_for(teammate).get("/?runs=all").text


def failed_run(user: User, name: str, hours_ago: float, reason: str = "") -> Run:
    run = factories.external_run(user, name=name)
    ended = timezone.now() - timedelta(hours=hours_ago)
    run_exit = {"class": "user_error", "reason": reason} if reason else None
    Run.objects.filter(pk=run.pk).update(state="failed", ended=ended, exit=run_exit)
    run.refresh_from_db()
    return run


def failed_part(page: str) -> str:
    return page[page.index('data-part="failed"') : page.index('data-part="devices"')]


def test_runs_that_failed_in_the_last_day_are_listed_with_their_cause(
    owner: User, teammate: User
) -> None:
    """They were only among all runs, with a filter, and their cause on their pages."""
    reasoned = failed_run(owner, "with-reason", 2, "CUDA out of memory")
    logged = failed_run(owner, "with-log", 3)
    lines = ["loading", "ValueError: no such column", "exit"]
    telemetry.logs_store(run=logged, attempt=1, batches=[(0, Lines(1, 1e9, lines))])
    silent = failed_run(teammate, "silent", 4)
    failed_run(owner, "yesterday", 25, "too old")
    factories.node("n1")
    whole = factories.client_for(owner).get("/?runs=all").text
    assert "none waiting, 3 runs failed in the last 24 hours." in whole
    page = failed_part(whole)
    places = [page.index(f'href="/runs/{run.pk}/"') for run in (reasoned, logged, silent)]
    assert places == sorted(places), "the newest first"
    for text in ("CUDA out of memory", "ValueError: no such column", "No reason was reported"):
        assert text in page
    assert "yesterday" not in page
    mine = failed_part(factories.client_for(owner).get("/?runs=mine").text)
    assert "with-log" in mine and "silent" not in mine


def test_more_failed_runs_than_fit_are_counted(owner: User) -> None:
    recent = [failed_run(owner, f"run-{number}", number, "bad data") for number in range(7)]
    old = failed_run(owner, "yesterday", 25, "bad data")
    client = factories.client_for(owner)
    part = failed_part(client.get("/").text)
    assert "2 more" in part
    address = re.search(r'<p class="pad">\s*<a href="([^"]+)"', part)
    assert address is not None
    listed = client.get(html.unescape(address[1])).text
    assert all(f'href="/runs/{run.pk}/"' in listed for run in recent)
    assert f'href="/runs/{old.pk}/"' not in listed, "the link opened every failed run"


def test_failed_runs_are_among_the_problems(owner: User) -> None:
    run = factories.external_run(owner, name="broken")
    fine = factories.external_run(owner, name="fine")
    client = factories.api(owner)
    for one, state in ((run, "failed"), (fine, "finished")):
        body = {"state": state}
        address = f"/api/v1/runs/{one.pk}/finish"
        answer = client.post(address, body, content_type="application/json")
        assert answer.status_code == 200
    page = factories.client_for(owner).get("/?events=troubles").text
    events = page[page.index('data-part="events"') :]
    assert "broken" in events and "fine" not in events
