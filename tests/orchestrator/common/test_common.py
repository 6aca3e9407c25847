"""Refusals, units, and the wake-up that must never fail a request."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta, timezone

import pytest
import redis
from django.db import transaction

from orchestrator.common import redis as ours
from orchestrator.common import units
from orchestrator.common.errors import Refusal, conflict
from workers.contracts import Problem
from workers.contracts.wire import names


def test_a_refusal_is_a_problem_document() -> None:
    wrong = Problem(field="plan.tp", message="6 heads do not divide by tp 4", hint="Use tp 3.")
    refusal = Refusal(
        "spec-invalid",
        "Not as it is",
        422,
        "Two things.",
        [wrong, {"field": "name", "message": "empty"}],
    )
    assert refusal.problem("/api/v1/runs") == {
        "type": "https://orrery.dev/problems/spec-invalid",
        "title": "Not as it is",
        "status": 422,
        "detail": "Two things.",
        "instance": "/api/v1/runs",
        "errors": [
            {"field": "plan.tp", "message": "6 heads do not divide by tp 4", "hint": "Use tp 3."},
            {"field": "name", "message": "empty", "hint": ""},
        ],
    }
    assert not refusal.retry
    assert conflict("Busy.", retry=True).retry_after_s == 1


def test_times_are_utc_with_a_z() -> None:
    time = datetime(2026, 1, 1, 1, 0, 3, tzinfo=timezone(timedelta(hours=1)))
    assert units.iso(time) == "2026-01-01T00:00:03Z"
    assert (
        units.iso(datetime(2026, 1, 1, 0, 0, 3, 250_000, tzinfo=UTC)) == "2026-01-01T00:00:03.250Z"
    )
    assert units.iso(None) is None


@pytest.mark.parametrize(
    ("text", "good"), [("12", True), (12, True), ("-1", False), ("٣", False), ("9" * 19, False)]
)
def test_row_numbers_are_plain_digits(text: object, good: bool) -> None:
    assert units.is_id(text) is good


@pytest.mark.django_db(transaction=True)
def test_waking_leaves_one_tick_and_only_after_commit(live_redis: str) -> None:
    with redis.Redis.from_url(live_redis) as reader:
        with transaction.atomic():
            ours.wake_scheduler()
            assert reader.llen(names.TICK) == 0
        ours.wake_scheduler()
        assert reader.llen(names.TICK) == 1
        reader.delete(names.TICK)
        with pytest.raises(ZeroDivisionError), transaction.atomic():
            ours.wake_scheduler()
            raise ZeroDivisionError
        assert reader.llen(names.TICK) == 0


@pytest.mark.django_db(transaction=True)
def test_an_unreachable_redis_fails_no_request(settings: object, tmp_path: object) -> None:
    settings.REDIS_URL = f"unix://{tmp_path}/no-server"  # type: ignore[attr-defined]
    ours.reset()
    with transaction.atomic():
        ours.wake_scheduler()
    ours.reset()
