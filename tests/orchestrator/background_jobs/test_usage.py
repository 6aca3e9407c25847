"""Usage: device-seconds by day, person, team and pool; reports on pages, in REST, as messages."""

from __future__ import annotations

import csv
import io
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from django.db import connection
from django.test.utils import CaptureQueriesContext

from orchestrator.accounts.models import User
from orchestrator.background_jobs import running
from orchestrator.background_jobs.models import Delivery, Subscription, UsageDay
from orchestrator.background_jobs.notifications import collect, subscriptions
from orchestrator.background_jobs.usage import measure, messages
from orchestrator.fleet.models import Device, Node
from orchestrator.runs import services as runs
from orchestrator.runs.models import Attempt, Run
from orchestrator.scheduling import services as scheduling
from orchestrator.scheduling.accounting.held import held_devices
from orchestrator.scheduling.models import Allocation, DeviceTime
from tests import factories
from tests.conftest import FakeClock

pytestmark = pytest.mark.django_db
NOON = datetime(2026, 3, 9, 12, tzinfo=UTC)  # a Monday


def hold(owner: User, start: datetime, hours: float, *, ended: bool = True) -> Attempt:
    """An attempt that held the two devices of node n1; half of its time was productive."""
    attempt = factories.running(factories.run(owner, devices=2), Node.objects.get())
    end = start + timedelta(hours=hours)
    for rank, device in enumerate(Device.objects.order_by("index")[:2]):
        released = end if ended else None
        Allocation.objects.create(
            attempt=attempt, device=device, rank=rank, created=start, released=released
        )
    if ended:
        seconds = 2 * 3600 * hours
        DeviceTime.objects.create(
            attempt=attempt, ended=end, final=True, allocated=seconds, productive=seconds / 2
        )
    return attempt


@pytest.fixture
def other(people: factories.People) -> User:
    """A submitter in no team."""
    return factories.user("other")


@pytest.fixture(autouse=True)
def used(clock: FakeClock, owner: User, other: User) -> None:
    """Saturday 22:00: the owner for 4 hours, the other for 1; Monday 11:00: the owner."""
    clock.time = NOON
    factories.node("n1", devices=2)
    saturday = datetime(2026, 3, 7, 22, tzinfo=UTC)
    hold(owner, saturday, 4)
    hold(other, saturday + timedelta(hours=4), 1)
    hold(owner, NOON - timedelta(hours=1), 9, ended=False)
    running.run_scheduled("usage")


def test_days_share_the_time_of_attempts(clock: FakeClock, owner: User, other: User) -> None:
    fields = ("day__day", "person", "device_s", "productive_s", "lost_s", "attempts")
    hour = 3600.0
    expected = [
        (7, "owner", 4 * hour, 2 * hour, 2 * hour, 1),
        (8, "other", 2 * hour, hour, hour, 1),
        (8, "owner", 4 * hour, 2 * hour, 2 * hour, 1),
        (9, "owner", 2 * hour, 0.0, 0.0, 1),
    ]
    assert list(UsageDay.objects.order_by("day", "person").values_list(*fields)) == expected
    clock.advance(3600)
    for _ in range(2):  # the same rows, replaced
        measure.measure_due(now=clock.now(), dry_run=False, renew=lambda: None)
    rows = list(UsageDay.objects.order_by("day", "person").values_list(*fields))
    assert rows == [*expected[:-1], (9, "owner", 4 * hour, 0.0, 0.0, 1)]
    clock.advance(4 * 24 * 3600)
    measure.measure_due(now=clock.now(), dry_run=False, renew=lambda: None)
    assert set(UsageDay.objects.filter(final=True).values_list("day__day", flat=True)) == {
        *range(7, 11)
    }


def test_reports_show_what_a_user_may_see(
    owner: User, teammate: User, other: User, operator: User
) -> None:
    path = "/api/v1/usage?from=2026-03-01&to=2026-03-31&by="
    answer = factories.api(operator).get(path + "team").json()
    team = owner.teams.get().name
    assert [(row["key"], row["device_s"]) for row in answer["items"]] == [
        (team, 36_000.0),
        ("", 7_200.0),
    ]
    assert (answer["total"]["device_s"], answer["final"], answer["from"]) == (
        43_200.0,
        False,
        "2026-03-01",
    )
    for user, people in ((teammate, ["owner"]), (other, ["other"])):
        rows = factories.api(user).get(path + "person").json()["items"]
        assert [row["key"] for row in rows] == people
    days = factories.api(owner).get(path + "day").json()["items"]
    assert [row["key"] for row in days] == ["2026-03-07", "2026-03-08", "2026-03-09"]
    text = factories.api(operator).get(path + "pool", headers={"Accept": "text/csv"}).content
    assert [*csv.reader(io.StringIO(text.decode()))][1][1:] == [
        "43200.0",
        "18000.0",
        "18000.0",
        "4",
        "0.48",  # 12 device-hours of CPU slots at the catalogue's 0.04 USD
        "",  # no power was measured
        "",
    ]


def test_usage_by_experiment_and_month_with_its_cost(owner: User, other: User) -> None:
    question = runs.experiment_create(owner=owner, name="question")
    Run.objects.filter(pk=Run.objects.filter(owner=owner).earliest("pk").pk).update(
        experiment=question
    )
    hold(owner, datetime(2026, 2, 28, 23, tzinfo=UTC), 2)  # one hour in each month
    path = "/api/v1/usage?from=2026-02-01&to=2026-03-31&by=experiment"
    rows = factories.api(owner).get(path).json()["items"]
    assert [(row["key"], row["device_s"], row["attempts"]) for row in rows] == [
        ("question", 28_800.0, 1),
        ("", 21_600.0, 3),  # one attempt in both months
    ]
    monthly = factories.api(owner).get(path + "&monthly=true").json()["items"]
    assert [(row["month"], row["key"], row["cost_usd"]) for row in monthly] == [
        ("2026-02", "", 0.08),
        ("2026-03", "question", 0.32),
        ("2026-03", "", 0.16),
    ]
    page = factories.client_for(owner)
    url = "/account/usage/?from=2026-02-01&to=2026-03-31&by=experiment&monthly=1"
    assert "question" in page.get(url).content.decode()
    lines = page.get(url + "&format=csv").content.decode().splitlines()
    assert (
        lines[0]
        == "month,experiment,device_s,productive_s,lost_s,attempts,cost_usd,energy_kwh,co2_kg"
    )
    assert lines[2].startswith("2026-03,question,28800.0,")
    months = factories.api(owner).get(path.replace("experiment", "month")).json()["items"]
    assert [row["key"] for row in months] == ["2026-03"]  # stored days: February was not measured


def test_usage_by_experiment_reads_visible_allocations_alone(owner: User, other: User) -> None:
    since, until = datetime(2026, 3, 1, tzinfo=UTC), datetime(2026, 4, 1, tzinfo=UTC)
    everyone = list(held_devices(since=since, until=until))
    assert {each.owner for each in everyone} == {owner.pk, other.pk}
    with CaptureQueriesContext(connection) as queries:
        own = list(held_devices(since=since, until=until, owners=[other.pk]))
    assert own == [each for each in everyone if each.owner == other.pk]
    scans = [each["sql"] for each in queries.captured_queries]
    assert all('"owner_id" IN' in sql for sql in scans), scans


@pytest.mark.parametrize(
    "query",
    [
        "by=color",
        "from=tomorrow",
        "from=2026-03-02&to=2026-03-01",
        "from=2020-01-01",
        "to=9999-12-31&by=experiment",
        "to=0001-01-01",
    ],
)
def test_wrong_periods_are_named(owner: User, query: str) -> None:
    answer = factories.api(owner).get(f"/api/v1/usage?{query}")
    assert answer.status_code == 422 and answer.json()["errors"][0]["field"] in ("by", "from", "to")
    page = factories.client_for(owner).get(f"/account/usage/?{query}")
    assert page.status_code == 422 and "alert" in page.content.decode()


def test_the_page_and_its_download(owner: User) -> None:
    page = factories.client_for(owner).get("/account/usage/?by=person").content.decode()
    assert "10 device-hours" in page and "owner" in page and "other" not in page
    download = factories.client_for(owner).get("/account/usage/?by=person&format=csv")
    assert download.content.decode().splitlines()[1].startswith("owner,36000.0")
    assert "attachment" in download["Content-Disposition"]
    empty = factories.client_for(factories.user("new")).get("/account/usage/").content.decode()
    assert "No usage in this period" in empty


def test_a_weekly_report_is_sent_once_and_only_with_visible_usage(
    clock: FakeClock, owner: User, teammate: User, monkeypatch: pytest.MonkeyPatch
) -> None:
    built: list[Subscription] = []
    body = messages._body

    def counted(row: Subscription, *args: Any) -> dict[str, object]:
        built.append(row)
        return body(row, *args)

    monkeypatch.setattr(messages, "_body", counted)
    clock.time = NOON - timedelta(days=6)
    for user, scope in ((owner, "team"), (teammate, "own")):
        subscriptions.subscription_create(
            by=user,
            name="usage",
            channel="webhook",
            target="https://example.com/hook",
            events=["usage_weekly"],
            scope=scope,
        )
    clock.time = NOON
    assert (collect.collect(), collect.collect()) == (2, 0)
    assert len(built) == 2, "the second call finds both stored"
    by_owner = {row.subscription.owner_id: row for row in Delivery.objects.all()}
    assert "8.0 device-hours, 50% productive" in by_owner[owner.pk].body["text"]
    assert by_owner[owner.pk].body["usage"]["from"] == "2026-03-02"
    assert "0.0 device-hours" in by_owner[teammate.pk].body["text"]
    clock.advance(7 * 24 * 3600)
    assert collect.collect() == 2


def test_usage_of_a_removed_node_remains(operator: User) -> None:
    """Also if its days were not measured yet, or are measured again."""
    before = list(UsageDay.objects.order_by("day", "person").values_list("day", "person", "pool"))
    sums = list(UsageDay.objects.order_by("day", "person").values_list("device_s", flat=True))
    assert sum(sums) > 0
    Attempt.objects.update(state="exited")
    for attempt in Attempt.objects.all():
        attempt.shares.update(state="exited")
    scheduling.node_remove(node=Node.objects.get(), by=operator)
    row = Allocation.objects.order_by("pk").last()
    assert row is not None
    assert (row.device, row.node_name, row.device_index, row.pool_name) == (
        None,
        "n1",
        1,
        "default",
    )
    UsageDay.objects.all().delete()
    running.run_scheduled("usage")
    again = UsageDay.objects.order_by("day", "person")
    assert list(again.values_list("day", "person", "pool")) == before
    assert list(again.values_list("device_s", flat=True)) == sums
    factories.node("n1", devices=2)
    assert Allocation.objects.filter(device=None).count() > 0, "a new node of the name has its own"
