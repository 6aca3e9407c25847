"""Events are numbered per run without gaps, recorded once, and published on the right topics."""

from __future__ import annotations

import json
import threading
from typing import Any

import pytest
from django.db import connection

from orchestrator.accounts.models import User
from orchestrator.common import live
from orchestrator.runs import selectors, services
from orchestrator.runs.models import RunEvent
from tests import factories


def test_an_event_reported_twice_is_recorded_once(owner: User) -> None:
    run = factories.run(owner)
    result = {
        "run": run,
        "type": "checkpoint_saved",
        "data": {"step": 4},
        "attempt": 1,
        "rank": 0,
        "origin": "1/0/1",
    }
    first = services.event_record(**result, time=1_790_000_000.5)
    assert first is not None and services.event_record(**result) is None
    assert selectors.serialize_event(first) == {
        "run": str(run.pk),
        "attempt": 1,
        "rank": 0,
        "seq": 3,
        "time": 1_790_000_000.5,
        "type": "checkpoint_saved",
        "data": {"step": 4},
    }
    batch = [
        services.NewEvent("note", {"n": n}, attempt=1, origin=f"1/0/{n}") for n in (1, 2, 2, 3)
    ]
    assert [event.seq for event in services.events_record(run=run, events=batch)] == [4, 5]


def test_non_finite_numbers_survive(owner: User) -> None:
    run = factories.run(owner)
    event = services.event_record(
        run=run, type="non_finite", data={"loss": float("nan"), "grads": [float("inf")]}
    )
    event.refresh_from_db()
    assert event.data == {"loss": "NaN", "grads": ["Infinity"]}


def test_the_fleet_topic_gets_relevant_events(owner: User) -> None:
    run = factories.run(owner)
    before = live.head("fleet").seq
    services.event_record(run=run, type="overflow_skipped_step", data={})
    services.event_record(run=run, type="node_lost", data={"node": "n1"})
    (result,) = [json.loads(text) for _, text in live.frames_after("fleet", before)]
    assert (result["type"], result["run"], result["event"]["type"]) == (
        "event",
        str(run.pk),
        "node_lost",
    )


def test_events_are_read_after_a_number(owner: User, stranger: User) -> None:
    run = factories.run(owner)
    for number in range(10):
        services.event_record(run=run, type="note" if number % 2 else "other", data={"n": number})
    assert [event.seq for event in selectors.events_of(run=run, after=9, limit=2)] == [10, 11]
    assert [event.data["n"] for event in selectors.events_of(run=run, types=["note"], limit=2)] == [
        1,
        3,
    ]
    assert [event.seq for event in selectors.events_of(run=run, newest=True, limit=3)] == [
        10,
        11,
        12,
    ]
    newest = selectors.events_visible_to(user=owner, limit=2)
    assert [event.seq for event in newest] == [12, 11]
    assert [
        event.seq
        for event in selectors.events_visible_to(user=owner, before_id=newest[-1].pk, limit=1)
    ] == [10]
    assert selectors.events_visible_to(user=stranger) == []


@pytest.mark.django_db(transaction=True)
def test_many_writers_leave_no_gap_and_no_duplicate() -> None:
    run = factories.run(factories.user("ada"))
    errors: list[Any] = []

    def write(writer: int) -> None:
        try:
            for number in range(10):
                origin = f"1/{writer % 2}/{number}"  # two writers report every event
                services.event_record(
                    run=run, type="note", data={}, attempt=1, rank=writer % 2, origin=origin
                )
        except Exception as error:
            errors.append(error)
        finally:
            connection.close()

    threads = [threading.Thread(target=write, args=(writer,)) for writer in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []
    seqs = list(RunEvent.objects.filter(run=run).order_by("seq").values_list("seq", flat=True))
    assert seqs == list(range(1, 23))
    assert live.head(f"run:{run.pk}").seq == 23  # and the state at the start
