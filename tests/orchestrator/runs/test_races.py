"""Concurrent users, nodes and schedulers on one run: no deadlock, one outcome."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
from django.db import connection

from orchestrator.common.errors import Refusal
from orchestrator.runs import selectors, services, states
from orchestrator.runs.models import Attempt, Run
from tests import factories

pytestmark = pytest.mark.django_db(transaction=True)


def at_once(*acts: Callable[[], Any]) -> list[Any]:
    """Runs all in threads that start together; their results, refusals included.

    Other errors are raised.
    """
    results: list[Any] = [None] * len(acts)
    start = threading.Barrier(len(acts))

    def act(index: int) -> None:
        start.wait()
        try:
            results[index] = acts[index]()
        except Exception as error:
            results[index] = error
        finally:
            connection.close()

    threads = [threading.Thread(target=act, args=(index,)) for index in range(len(acts))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for result in results:
        if isinstance(result, Exception) and not isinstance(result, Refusal):
            raise result
    return results


def test_one_scheduler_of_many_places_the_run() -> None:
    run, node = factories.run(factories.user("ada")), factories.node()
    place = lambda: services.attempt_create(  # noqa: E731
        run=Run.objects.get(pk=run.pk), placement=factories.placement(node)
    )
    assert sum(attempt is not None for attempt in at_once(place, place, place, place)) == 1
    assert Attempt.objects.count() == 1


def test_cancel_exit_edit_and_events_meet() -> None:
    ada = factories.user("ada")
    node = factories.node()
    for _ in range(5):
        run = factories.run(ada)
        attempt = factories.running(run, node)
        fresh = lambda pk=run.pk: Run.objects.get(pk=pk)  # noqa: E731
        at_once(
            lambda fresh=fresh: services.run_cancel(run=fresh(), by=ada),
            lambda pk=attempt.pk: services.attempt_exited(
                attempt=Attempt.objects.get(pk=pk), exit_class="ok"
            ),
            lambda pk=attempt.pk: services.attempt_exited(
                attempt=Attempt.objects.get(pk=pk), exit_class="lost"
            ),
            lambda fresh=fresh: services.run_update(run=fresh(), by=ada, priority=1),
            lambda fresh=fresh: [
                services.event_record(run=fresh(), type="note", data={}) for _ in range(5)
            ],
        )
        run.refresh_from_db()
        exits = [
            event
            for event in selectors.events_of(run=run)
            if event.type == "state_changed" and event.data["new"] == "exited"
        ]
        assert len(exits) == 1
        assert run.state == "queued" or run.state in states.ENDED
        seqs = [event.seq for event in selectors.events_of(run=run)]
        assert seqs == list(range(1, len(seqs) + 1))
        services.run_cancel(run=run, by=ada) if run.state == "queued" else None


def test_one_of_two_edits_of_a_version_is_refused() -> None:
    ada = factories.user("ada")
    run = factories.run(ada)
    edit = lambda: services.run_update(  # noqa: E731
        run=Run.objects.get(pk=run.pk), by=ada, notes="x", version=1
    )
    results = at_once(edit, edit, edit)
    assert sorted(isinstance(result, Refusal) for result in results) == [False, True, True]
