"""Runs: submit, list, look, edit, act. What a run did and left behind is in `history`, its numbers
in `series`.

Reads input, calls one service or selector, shapes the answer; decides nothing.
"""

from __future__ import annotations

from typing import Annotated, Any

from django.http import HttpRequest, HttpResponse
from ninja import Query, Router
from pydantic import AliasChoices, Field

from orchestrator.api.http.auth import needs, user
from orchestrator.api.http.etags import check_version, tagged_answer, wanted_version
from orchestrator.api.http.idempotency import creates
from orchestrator.api.http.lookup import experiment_of, run_of
from orchestrator.api.http.pagination import Page, after, paged
from orchestrator.api.schemas import PageOf, RunOut
from orchestrator.runs import selectors, services
from workers.contracts.base import Contract

router = Router(tags=["runs"])
LOCATION = "/api/v1/runs/{id}"


class Submission(Contract):
    name: Annotated[
        str, Field(max_length=160, description="kind and model where it is left out")
    ] = ""
    experiment: Annotated[
        int | str | None, Field(description="its name or number; a new name makes a new one")
    ] = None
    spec: Annotated[dict[str, Any], Field(json_schema_extra={"x-contract": "RunSpec"})]
    force: Annotated[
        bool, Field(description="submit although the plan is predicted not to fit")
    ] = False


class Filters(Contract):
    state: Annotated[str | None, Field(description="one, or several with commas between")] = None
    kind: Annotated[str | None, Field(description="one, or several with commas between")] = None
    experiment: Annotated[str | None, Field(description="its name or number")] = None
    tag: str | None = None
    owner: Annotated[str | None, Field(description="a username; `me` is the caller")] = None
    q: Annotated[str | None, Field(description="what name, notes or tags contain")] = None


class RunChange(Contract):
    """What is left out stays as it is."""

    priority: Annotated[int, Field(ge=-1_000_000, le=1_000_000)] | None = None
    tags: list[Annotated[str, Field(min_length=1, max_length=100)]] | None = None
    notes: Annotated[str, Field(max_length=20_000)] | None = None


class Clone(Contract):
    spec: Annotated[
        dict[str, Any],
        Field(
            validation_alias=AliasChoices("spec", "changes"),
            description="fields of the spec to replace; objects are merged",
        ),
    ] = {}


class Fork(Clone):
    step: Annotated[int, Field(ge=0, description="of a checkpoint that this run keeps")]
    name: Annotated[
        str, Field(max_length=160, description="the parent's name and step where it is left out")
    ] = ""
    force: Annotated[bool, Field(description="fork although the plan is predicted not to fit")] = (
        False
    )


class Retry(Contract):
    step: Annotated[
        int | None, Field(ge=0, description="rewind to this checkpoint; the newest where left out")
    ] = None


@router.post("", response={201: RunOut}, auth=needs("runs"), summary="Submit a run")
@creates(RunOut, location=LOCATION)
def run_create(request: HttpRequest, body: Submission) -> Any:
    """422 tells every wrong field, or what would make a plan fit that does not; nothing is created
    then.
    """
    experiment: Any = body.experiment
    if isinstance(experiment, int):
        experiment = experiment_of(request, experiment)
    run = services.run_submit(
        owner=user(request),
        name=body.name.strip() or _named_after(body.spec),
        spec=body.spec,
        experiment=experiment or None,
        force=body.force,
    )
    return selectors.run_answer(run)


@router.get("", response=PageOf[RunOut], auth=needs("read"), summary="Runs, newest first")
def run_list(request: HttpRequest, page: Page, filters: Query[Filters]) -> dict[str, Any]:
    wanted = dict(filters)
    if filters.owner == "me":
        wanted["owner"] = user(request).get_username()
    rows = selectors.run_list(
        user=user(request), before_id=after(page, "runs"), limit=page.limit + 1, **wanted
    )
    return paged(rows, page, "runs", lambda run: run.pk, selectors.run_answer)


@router.get("/{int:id}", response=RunOut, auth=needs("read"), summary="One run")
def run_detail(request: HttpRequest, id: int) -> HttpResponse:
    """Carries an ETag: for If-Match with PATCH, and If-None-Match to ask again at no cost."""
    return _answer(request, run_of(request, id))


@router.patch(
    "/{int:id}", response=RunOut, auth=needs("runs"), summary="Change priority, tags or notes"
)
def run_update(request: HttpRequest, id: int, body: RunChange) -> HttpResponse:
    """With If-Match only if nobody else edited it since (412)."""
    run, version = run_of(request, id), wanted_version(request)
    check_version(version, run.version, f"Run {run.pk}")
    changed = services.run_update(
        run=run,
        by=user(request),
        priority=body.priority,
        tags=body.tags,
        notes=body.notes,
        version=version,
    )
    return _answer(request, changed)


@router.post("/{int:id}/cancel", response=RunOut, auth=needs("runs"), summary="End the run")
def run_cancel(request: HttpRequest, id: int) -> Any:
    return _act(request, id, services.run_cancel)


@router.post(
    "/{int:id}/pause",
    response=RunOut,
    auth=needs("runs"),
    summary="Checkpoint, stop, keep for later",
)
def run_pause(request: HttpRequest, id: int) -> Any:
    return _act(request, id, services.run_pause)


@router.post(
    "/{int:id}/resume", response=RunOut, auth=needs("runs"), summary="Queue a paused run again"
)
def run_resume(request: HttpRequest, id: int) -> Any:
    return _act(request, id, services.run_resume)


@router.post(
    "/{int:id}/retry",
    response=RunOut,
    auth=needs("runs"),
    summary="Queue an ended run for another attempt",
)
def run_retry(request: HttpRequest, id: int, body: Retry | None = None) -> Any:
    """With a step, rewinds: it goes on from that checkpoint, and what it did after it is given up."""
    if body is None or body.step is None:
        return _act(request, id, services.run_retry)
    made = services.run_rewind(run=run_of(request, id), by=user(request), step=body.step)
    return selectors.run_answer(made)


@router.post(
    "/{int:id}/checkpoint", response=RunOut, auth=needs("runs"), summary="Save a checkpoint now"
)
def run_checkpoint(request: HttpRequest, id: int) -> Any:
    return _act(request, id, services.run_checkpoint)


@router.post(
    "/{int:id}/profile", response=RunOut, auth=needs("runs"), summary="Profile the next step"
)
def run_profile(request: HttpRequest, id: int) -> Any:
    """torch's profiler over one step, of a rank of each pipeline place: artifacts, and
    `profile_saved` events.
    """
    return _act(request, id, services.run_profile)


@router.post(
    "/{int:id}/memory-snapshot",
    response=RunOut,
    auth=needs("runs"),
    summary="See what holds memory",
)
def run_memory_snapshot(request: HttpRequest, id: int) -> Any:
    """Over one step, of a rank of each pipeline place: artifacts, and `memory_profile` events with
    its peak by kind.

    By torch's MemTracker on a CPU; on a GPU the allocator's counters, and its history for
    pytorch.org/memory_viz.
    """
    return _act(request, id, services.run_memory_snapshot)


@router.post(
    "/{int:id}/clone",
    response={201: RunOut},
    auth=needs("runs"),
    summary="The same again, as a new run",
)
@creates(RunOut, location=LOCATION)
def run_clone(request: HttpRequest, id: int, body: Clone | None = None) -> Any:
    made = services.run_clone(
        run=run_of(request, id), by=user(request), changes=(body.spec if body else None) or None
    )
    return selectors.run_answer(made)


@router.post(
    "/{int:id}/fork",
    response={201: RunOut},
    auth=needs("runs"),
    summary="A new run from a checkpoint",
)
@creates(RunOut, location=LOCATION)
def run_fork(request: HttpRequest, id: int, body: Fork) -> Any:
    """The spec changes as a merge patch (RFC 7396), its plan too; 422 tells which steps are kept."""
    made = services.run_fork(
        run=run_of(request, id),
        by=user(request),
        step=body.step,
        changes=body.spec,
        name=body.name.strip() or None,
        force=body.force,
    )
    return selectors.run_answer(made)


def _named_after(spec: dict[str, Any]) -> str:
    """`train llama-tiny`: kind and model, for runs that were given no name."""
    model = spec.get("model", "llama-tiny" if spec.get("kind") != "external" else "")
    if isinstance(model, dict):
        model = model.get("name") or model.get("path") or model.get("package") or ""
    return f"{spec.get('kind', 'run')} {model}".strip()[:160]


def _act(request: HttpRequest, id: int, service: Any) -> Any:
    return selectors.run_answer(service(run=run_of(request, id), by=user(request)))


def _answer(request: HttpRequest, run: Any) -> HttpResponse:
    body = RunOut.model_validate(selectors.run_answer(run)).model_dump(mode="json")
    return tagged_answer(request, body, run.version)
