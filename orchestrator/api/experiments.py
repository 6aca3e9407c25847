"""Experiments: list, create, get, edit. Team members see them; owners and operators edit."""

from __future__ import annotations

from typing import Annotated, Any

from django.http import HttpRequest
from ninja import Router
from pydantic import Field

from orchestrator.api.http.auth import require_scope, user
from orchestrator.api.http.idempotency import creates
from orchestrator.api.http.lookup import get_experiment
from orchestrator.api.http.pagination import paginated
from orchestrator.api.schemas.runs import ExperimentOut
from orchestrator.runs import selectors, services
from workers.contracts.base import Contract

router = Router(tags=["experiments"])


class NewExperiment(Contract):
    """An experiment to create."""

    name: Annotated[str, Field(min_length=1, max_length=120)]
    hypothesis: Annotated[str, Field(max_length=20_000)] = ""
    notes: Annotated[str, Field(max_length=200_000, description="Markdown")] = ""


class ExperimentChange(Contract):
    """The fields to change; omitted fields keep their values."""

    hypothesis: Annotated[str, Field(max_length=20_000)] | None = None
    notes: Annotated[str, Field(max_length=200_000)] | None = None
    pinned: (
        Annotated[list[str], Field(max_length=40, description="series charted on its page")] | None
    ) = None


@router.get(
    "", response=list[ExperimentOut], auth=require_scope("read"), summary="List experiments"
)
@paginated(
    name="experiments",
    serialize=selectors.serialize_experiment,
    newest_first=True,
)
def experiment_list(request: HttpRequest, q: str | None = None) -> Any:
    """Experiments that you may see, newest first. `q` filters by name."""
    rows = selectors.experiments_visible_to(user=user(request))
    return rows.filter(name__icontains=q) if q else rows


@router.post(
    "", response={201: ExperimentOut}, auth=require_scope("runs"), summary="Create an experiment"
)
@creates(ExperimentOut, location="/api/v1/experiments/{id}")
def experiment_create(request: HttpRequest, body: NewExperiment) -> Any:
    """Creates an experiment. Names are unique: 409 for one that exists."""
    experiment = services.experiment_create(
        name=body.name, hypothesis=body.hypothesis, notes=body.notes, owner=user(request)
    )
    return selectors.serialize_experiment(experiment)


@router.get(
    "/{int:id}", response=ExperimentOut, auth=require_scope("read"), summary="Get an experiment"
)
def experiment(request: HttpRequest, id: int) -> Any:
    """One experiment."""
    return selectors.serialize_experiment(get_experiment(request, id))


@router.patch(
    "/{int:id}", response=ExperimentOut, auth=require_scope("runs"), summary="Update an experiment"
)
def experiment_update(request: HttpRequest, id: int, body: ExperimentChange) -> Any:
    """Changes hypothesis, notes or pinned series. For the owner and operators."""
    changed = services.experiment_update(
        experiment=get_experiment(request, id), by=user(request), **dict(body)
    )
    return selectors.serialize_experiment(changed)
