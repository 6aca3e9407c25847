"""Lists of runs without objects have the same representation as single runs."""

from __future__ import annotations

import pytest

from orchestrator.accounts.models import User
from orchestrator.runs import selectors, services
from orchestrator.runs.models import Run
from tests import factories

pytestmark = pytest.mark.django_db


def test_rows_equal_serialized_runs(owner: User, django_assert_num_queries: object) -> None:
    first = factories.run(owner, name="first")
    services.run_update(run=first, by=owner, tags=["zebra", "ant"], notes="text")
    factories.external_run(owner)
    Run.objects.filter(pk=first.pk).update(forked_from=first, wait_reason="waits", exit={"a": 1})
    for filters in ({}, {"tag": "ant"}, {"limit": 1}, {"q": "zeb"}, {"state": "nothing"}):
        rows = selectors.run_rows(user=owner, **filters)
        assert rows == [
            selectors.serialize_run(run) for run in selectors.run_list(user=owner, **filters)
        ]
    with django_assert_num_queries(3):  # teams, runs, tags
        selectors.run_rows(user=owner)
