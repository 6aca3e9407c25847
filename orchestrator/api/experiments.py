"""Experiments: a question and the runs that answer it.

Everyone of a team sees them, owners and operators edit.
"""

from __future__ import annotations

from typing import Annotated, Any

from django.http import HttpRequest
from ninja import Router
from pydantic import Field

from orchestrator.api.http.auth import needs, user
from orchestrator.api.http.idempotency import creates
from orchestrator.api.http.lookup import experiment_of
from orchestrator.api.http.pagination import Page, paged_query
from orchestrator.api.schemas import ExperimentOut, PageOf
from orchestrator.runs import selectors, services
from workers.contracts.base import Contract

router = Router(tags=["experiments"])


class NewExperiment(Contract):
    name: Annotated[str, Field(min_length=1, max_length=120)]
    hypothesis: Annotated[str, Field(max_length=20_000)] = ""
    notes: Annotated[str, Field(max_length=200_000, description="Markdown")] = ""


class ExperimentChange(Contract):
    """What is left out stays as it is."""

    hypothesis: Annotated[str, Field(max_length=20_000)] | None = None
    notes: Annotated[str, Field(max_length=200_000)] | None = None
    pinned: (
        Annotated[list[str], Field(max_length=40, description="series charted on its page")] | None
    ) = None


@router.get(
    "", response=PageOf[ExperimentOut], auth=needs("read"), summary="Experiments, newest first"
)
def experiment_list(request: HttpRequest, page: Page, q: str | None = None) -> dict[str, Any]:
    rows = selectors.experiments_visible_to(user=user(request))
    if q:
        rows = rows.filter(name__icontains=q)
    return paged_query(rows, page, "experiments", selectors.experiment_answer, newest_first=True)


@router.post("", response={201: ExperimentOut}, auth=needs("runs"), summary="Open an experiment")
@creates(ExperimentOut, location="/api/v1/experiments/{id}")
def experiment_create(request: HttpRequest, body: NewExperiment) -> Any:
    made = services.experiment_create(
        name=body.name, hypothesis=body.hypothesis, notes=body.notes, owner=user(request)
    )
    return selectors.experiment_answer(made)


@router.get("/{int:id}", response=ExperimentOut, auth=needs("read"), summary="One experiment")
def experiment(request: HttpRequest, id: int) -> Any:
    return selectors.experiment_answer(experiment_of(request, id))


@router.patch(
    "/{int:id}", response=ExperimentOut, auth=needs("runs"), summary="Change an experiment"
)
def experiment_update(request: HttpRequest, id: int, body: ExperimentChange) -> Any:
    changed = services.experiment_update(
        experiment=experiment_of(request, id), by=user(request), **dict(body)
    )
    return selectors.experiment_answer(changed)
