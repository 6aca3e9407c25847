"""Delivery of reports: after an outage, after errors, and when a report ends the scheduler."""

from __future__ import annotations

from typing import Any

import pytest
from django.db import OperationalError

from orchestrator.accounts.models import User
from orchestrator.common import redis as common_redis
from orchestrator.common.stream_groups import StreamEntry
from orchestrator.dead_letters import failure_counts, outages
from orchestrator.dead_letters.models import DeadLetter
from orchestrator.scheduling.reports import delivery, handler
from orchestrator.scheduling.reports.delivery import Delivery
from orchestrator.scheduling.reports.inbox import Entry
from tests import factories
from tests.orchestrator.scheduling.conftest import Broker
from workers.contracts.wire import names

pytestmark = pytest.mark.django_db
REPORT = Entry(StreamEntry(names.REPORTS, b"1000-0", {}), b"text")


class Handler:
    """Fails with the given errors in turn, then succeeds."""

    def __init__(self, *errors: Exception) -> None:
        self.errors, self.calls = list(errors), 0

    def __call__(self, entry: Entry) -> None:
        self.calls += 1
        if self.errors:
            raise self.errors.pop(0)


@pytest.fixture(autouse=True)
def no_wait(monkeypatch: pytest.MonkeyPatch, broker: Broker) -> None:
    monkeypatch.setattr(delivery, "_RETRY_S", 0.0)


def test_a_report_is_delivered_again_after_an_outage() -> None:
    handle = Handler(*[OperationalError("server closed the connection")] * 5)
    reports = Delivery(handle)
    for _ in range(5):
        with pytest.raises(OperationalError):
            reports.deliver(reports.due() or REPORT)
        assert not reports.empty
    due = reports.due()
    assert due == REPORT and reports.empty
    assert reports.deliver(due)
    assert (handle.calls, DeadLetter.objects.count()) == (6, 0)


def test_a_report_that_fails_three_times_becomes_a_dead_letter() -> None:
    handle = Handler(*[KeyError("step")] * 9)
    reports = Delivery(handle)
    assert not reports.deliver(REPORT)
    assert not reports.deliver(reports.due() or pytest.fail())
    assert reports.deliver(reports.due() or pytest.fail()) and reports.empty
    letter = DeadLetter.objects.get()
    assert (letter.source, letter.code, letter.reason) == ("reports", "failed", "KeyError: 'step'")
    assert (bytes(letter.body), letter.written) == (b"text", 1.0)
    assert failure_counts.counted(common_redis.client(), names.REPORTS) == set()


def test_two_failures_and_a_success_leave_nothing() -> None:
    reports = Delivery(Handler(KeyError(), KeyError()))
    assert not reports.deliver(REPORT)
    assert not reports.deliver(reports.due() or pytest.fail())
    assert reports.deliver(reports.due() or pytest.fail())
    assert not DeadLetter.objects.exists()
    assert failure_counts.counted(common_redis.client(), names.REPORTS) == set()


def test_a_report_that_ends_the_scheduler_becomes_a_dead_letter() -> None:
    claimed = REPORT._replace(claimed=True)

    class Killed(BaseException):
        pass

    def kill(entry: Entry) -> None:
        raise Killed

    for _ in range(3):  # each time another process
        with pytest.raises(Killed):
            Delivery(kill).deliver(claimed)
    assert Delivery(kill).deliver(claimed)
    assert "ended the scheduler" in DeadLetter.objects.get().reason


def test_invalid_reports_are_dead_letters(broker: Broker) -> None:
    assert not handler.report(b"\xff\xfe", written=7.0)
    letter = DeadLetter.objects.get()
    assert (letter.source, letter.code, letter.written) == ("reports", "malformed", 7.0)


def test_a_checkpoint_report_with_a_wrong_type_is_a_dead_letter(
    broker: Broker, owner: User
) -> None:
    from tests.orchestrator.scheduling.conftest import FakeNode

    on = factories.node("n1", devices=2)
    attempt = factories.running(factories.run(owner, devices=2), on)
    path = f"runs/{attempt.run_id}/checkpoints/step-1"
    for data in ({"step": [1]}, {"step": 1, "tokens": {}}, {"step": -1}):
        assert not FakeNode(on).send_report(attempt, "checkpoint", path=path, **data)
    assert DeadLetter.objects.filter(code="malformed").count() == 3


@pytest.mark.parametrize(
    ("error", "outage"),
    [
        (OperationalError("database is locked"), True),
        (OperationalError("could not connect to server"), True),
        (OperationalError("too many SQL variables"), False),
        (OperationalError("string or blob too big"), False),
        (ConnectionResetError(), True),
        (TypeError(), False),
        (MemoryError(), False),
    ],
)
def test_outages_differ_from_errors_of_a_message(error: Any, outage: bool) -> None:
    assert outages.is_outage(error) == outage
