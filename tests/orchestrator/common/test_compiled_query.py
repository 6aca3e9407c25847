"""Queries that are compiled once return what the queryset returns, with as many queries."""

from __future__ import annotations

from typing import Any

import pytest
from django.db.models import Value

from orchestrator.accounts.models import User
from orchestrator.common.compiled_query import CompiledQuery
from orchestrator.runs.models import Experiment, Run, RunTag
from tests import factories

_RUNS = CompiledQuery(
    lambda kind, id: (
        Run.objects.select_related("owner", "experiment")
        .filter(kind=kind, state="queued", pk__gte=id)
        .order_by("pk")
    ),
    str,
    int,
)


@pytest.mark.django_db
def test_objects_equal_those_of_the_queryset(owner: User, django_assert_num_queries: Any) -> None:
    warmup = Experiment.objects.create(name="warmup", owner=owner)
    first = factories.run(owner)
    Run.objects.filter(pk=first.pk).update(experiment=warmup)
    second = factories.run(owner)
    factories.external_run(owner)
    expected = Run.objects.select_related("owner", "experiment").filter(
        pk__in=[first.pk, second.pk]
    )
    _RUNS.rows("train", first.pk)  # compiles
    with django_assert_num_queries(1):
        rows = _RUNS.rows("train", first.pk)
        names = [(row.owner.username, row.experiment and row.experiment.name) for row in rows]
    assert [vars_of(row) for row in rows] == [vars_of(row) for row in expected.order_by("pk")]
    assert names == [(owner.username, "warmup"), (owner.username, None)]
    assert [row.pk for row in _RUNS.rows("train", second.pk)] == [second.pk]
    assert _RUNS.first("train", second.pk + 10) is None
    rows[0].notes = "changed"
    rows[0].save()
    assert Run.objects.get(pk=first.pk).notes == "changed"


@pytest.mark.django_db
def test_a_query_that_cannot_be_compiled_once_is_refused() -> None:
    ignored = CompiledQuery(lambda id: RunTag.objects.filter(pk=1), int)
    annotated = CompiledQuery(lambda id: RunTag.objects.filter(pk=id).annotate(one=Value(1)), int)
    for query in (ignored, annotated):
        with pytest.raises(AssertionError):
            query.rows(1)


def vars_of(run: Run) -> dict[str, Any]:
    return {name: value for name, value in vars(run).items() if name != "_state"}
