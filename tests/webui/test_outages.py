"""Every page names what is down; with the database down, pages and REST answer 503 and say so."""

from __future__ import annotations

import math
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import pytest
import redis
from django.db import OperationalError
from django.test import Client

from orchestrator.accounts.models import User
from orchestrator.common import clock
from orchestrator.common import redis as common_redis
from orchestrator.common.stream_groups import GroupReader
from orchestrator.scheduling import lease, selectors
from orchestrator.scheduling.models import Lease
from tests import factories
from webui.views import outages
from workers.contracts.wire import names

pytestmark = pytest.mark.django_db


@pytest.fixture(autouse=True)
def fresh(redis_url: str, settings: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[redis.Redis]:
    settings.REDIS_URL = redis_url
    common_redis.reset()
    monkeypatch.setattr(outages, "_newest", (-outages._LIFE_S, []))
    with redis.Redis.from_url(redis_url) as client:
        client.flushall()
        yield client
    common_redis.reset()


def test_every_page_names_what_is_down_and_reads_it_again(
    owner: User, monkeypatch: pytest.MonkeyPatch
) -> None:
    browser = factories.client_for(owner)
    for path in ("/queue/", "/fleet/", "/runs/", "/runs/new/", "/planner/"):
        page = browser.get(path).content.decode()
        assert 'hx-get="/outages/"' in page, path
        assert "The scheduler has not run yet" in page, path
    monkeypatch.setattr(outages, "_newest", (-outages._LIFE_S, []))
    assert lease.hold("a-host-1-x", beat=True)
    assert browser.get("/outages/").content.strip() == b""


def test_pages_share_a_reading_of_few_queries(
    monkeypatch: pytest.MonkeyPatch,
    django_assert_max_num_queries: Any,
    django_assert_num_queries: Any,
) -> None:
    with django_assert_max_num_queries(3):
        outages.troubles()
    monkeypatch.setattr(outages, "_newest", (math.inf, outages._newest[1]))
    with django_assert_num_queries(0):
        assert "the scheduler has not run yet" in outages.troubles()[0]


def test_a_stopped_scheduler_is_named(owner: User, monkeypatch: pytest.MonkeyPatch) -> None:
    assert lease.hold("a-host-1-x", beat=True)
    now = clock.now()
    monkeypatch.setattr(clock, "now", lambda: now)
    Lease.objects.update(beat=now - timedelta(seconds=90))
    text = factories.client_for(owner).get("/outages/").content.decode()
    assert "The scheduler last ran 90 s ago; no run starts until it works again." in text


def test_a_stopped_ingest_is_named_although_nothing_waits(
    fresh: redis.Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert lease.hold("a-host-1-x", beat=True)
    reader = GroupReader(names.TELEMETRY_GROUP, "ingest")
    reader.read(fresh, [names.TELEMETRY], count=1, limit_bytes=1)
    assert selectors.health()["troubles"] == []
    monkeypatch.setattr(selectors, "_INGEST_IDLE_S", -1.0)
    [trouble] = selectors.health()["troubles"]
    assert trouble.startswith("ingest has not read for")


def test_without_the_database_pages_and_rest_say_so(
    owner: User, monkeypatch: pytest.MonkeyPatch
) -> None:
    browser, api = factories.client_for(owner), factories.api(owner)

    def down(**_: Any) -> Any:
        raise OperationalError("could not connect to server")

    monkeypatch.setattr("orchestrator.runs.selectors.runs_visible_to", down)
    browser.raise_request_exception = api.raise_request_exception = False
    page = browser.get("/queue/")
    assert (page.status_code, page["Retry-After"]) == (503, "10")
    assert "The database does not answer" in page.content.decode()
    answer = api.get("/api/v1/queue")
    assert (answer.status_code, answer["Retry-After"]) == (503, "10")
    assert answer.json()["type"].endswith("database-unavailable")


def test_other_errors_stay_internal_errors(owner: User, monkeypatch: pytest.MonkeyPatch) -> None:
    browser: Client = factories.client_for(owner)

    def broken(**_: Any) -> Any:
        raise KeyError("secret detail")

    monkeypatch.setattr("orchestrator.runs.selectors.runs_visible_to", broken)
    browser.raise_request_exception = False
    page = browser.get("/queue/")
    assert page.status_code == 500
    assert "Internal error" in page.content.decode() and "secret" not in page.content.decode()
