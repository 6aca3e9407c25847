"""Runs: submit, list, get, edit, act. `history` has their output, `series` their metrics."""

from __future__ import annotations

from typing import Any

from django.http import HttpRequest, HttpResponse
from ninja import Query, Router

from orchestrator.api.http.auth import require_scope, user
from orchestrator.api.http.etags import check_version, etag_response, if_match_version
from orchestrator.api.http.idempotency import creates
from orchestrator.api.http.lookup import get_experiment, get_run
from orchestrator.api.http.pagination import Page, encode_cursor, last_key, last_text
from orchestrator.api.http.responses import json_response
from orchestrator.api.schemas.base import PageOf
from orchestrator.api.schemas.run_requests import (
    BundleSubmission,
    Clone,
    Filters,
    Fork,
    Retry,
    RunChange,
    SpecToCheck,
    Submission,
)
from orchestrator.api.schemas.runs import CheckOut, CheckpointOut, RunOut
from orchestrator.run_table import selectors as run_table
from orchestrator.runs import bundles, selectors, services, storage
from orchestrator.scheduling import selectors as scheduling

router = Router(tags=["runs"])
LOCATION = "/api/v1/runs/{id}"


@router.post("", response={201: RunOut}, auth=require_scope("runs"), summary="Submit a run")
@creates(RunOut, location=LOCATION)
def run_create(request: HttpRequest, body: Submission) -> Any:
    """Checks the spec, queues the run and returns it.

    422 names every wrong field, or the nearest changes with which a plan would fit; nothing is
    created then.
    """
    experiment: Any = body.experiment
    if isinstance(experiment, int):
        experiment = get_experiment(request, experiment)
    run = services.run_submit(
        owner=user(request),
        name=body.name.strip() or _default_name(body.spec),
        spec=body.spec,
        experiment=experiment or None,
        force=body.force,
    )
    return selectors.serialize_run(run)


@router.post("/check", response=CheckOut, auth=require_scope("runs"), summary="Check a spec")
def run_check(request: HttpRequest, body: SpecToCheck) -> Any:
    """Resolves plan and sizes of a spec and predicts them, as a submission does; creates nothing.

    Also answers 200 for a spec with `problems`.
    """
    return services.spec_preview(body.spec, by=user(request))


@router.post(
    "/from-bundle", response={201: RunOut}, auth=require_scope("runs"), summary="Submit a bundle"
)
@creates(RunOut, location=LOCATION)
def run_from_bundle(request: HttpRequest, body: BundleSubmission) -> Any:
    """Checks that code and data are those of the original run, and queues it with the same plan.

    409 `bundle-of-another-version` for a bundle of another release.
    """
    run = bundles.bundle_submit(
        owner=user(request),
        bundle=body.bundle,
        name=body.name,
        other_versions=body.other_versions,
        force=body.force,
    )
    return selectors.serialize_run(run)


@router.get(
    "/{int:id}/bundle",
    response=dict[str, Any],
    auth=require_scope("read"),
    summary="Download a reproducibility bundle",
)
def run_bundle(request: HttpRequest, id: int) -> Any:
    """Spec, plan, versions, code and fingerprints of data, as one document for `from-bundle`."""
    return bundles.bundle_of(get_run(request, id))


@router.get("", response=PageOf[RunOut], auth=require_scope("read"), summary="List runs")
def run_list(request: HttpRequest, filters: Query[Filters], page: Page) -> HttpResponse:
    """Runs that you may see, newest first, or in the order of `sort`; runs without it come last.

    `query` filters by columns of runs, values of specs and metrics; its grammar is in the
    documentation of the runs table. 422 says where a query cannot be read.
    """
    by, wanted = user(request), filters.chosen(user(request))
    if not filters.query and not filters.sort:
        rows = selectors.run_rows(
            user=by, before_id=last_key(page, "runs"), limit=page.limit + 1, **wanted
        )
        more, rows = len(rows) > page.limit, rows[: page.limit]
        last: int | str = int(rows[-1]["id"]) if more else 0
    else:
        names = run_table.known_names(user=by)
        places = run_table.table_ids(
            runs=run_table.matching(user=by, names=names, **wanted),
            sort=run_table.read_sort(filters.sort or "", names),
            after=last_text(page, "runs"),
            limit=page.limit + 1,
        )
        more, places = len(places) > page.limit, places[: page.limit]
        rows = run_table.serialize_page([id for id, _ in places])
        last = places[-1][1] if more else ""
    items = [row | {"device_time": None} for row in rows]
    return json_response(
        {"items": items, "next_cursor": encode_cursor("runs", last) if more else None}
    )


@router.get("/{int:id}", response=RunOut, auth=require_scope("read"), summary="Get a run")
def run_detail(request: HttpRequest, id: int) -> HttpResponse:
    """One run, with an ETag for If-Match (PATCH) and If-None-Match (304 if unchanged)."""
    return _response(request, get_run(request, id))


@router.patch(
    "/{int:id}",
    response=RunOut,
    auth=require_scope("runs"),
    summary="Update a run",
)
def run_update(request: HttpRequest, id: int, body: RunChange) -> HttpResponse:
    """Changes priority, tags or notes. With If-Match: 412 if the run was edited since."""
    run, version = get_run(request, id), if_match_version(request)
    check_version(version, run.version, f"Run {run.pk}")
    changed = services.run_update(
        run=run,
        by=user(request),
        priority=body.priority,
        tags=body.tags,
        notes=body.notes,
        version=version,
    )
    return _response(request, changed)


@router.post(
    "/{int:id}/cancel", response=RunOut, auth=require_scope("runs"), summary="Cancel a run"
)
def run_cancel(request: HttpRequest, id: int) -> Any:
    """Ends a waiting run at once; a running one stops first. Cancelling twice has no effect."""
    return _act(request, id, services.run_cancel)


@router.post(
    "/{int:id}/pause",
    response=RunOut,
    auth=require_scope("runs"),
    summary="Pause a run",
)
def run_pause(request: HttpRequest, id: int) -> Any:
    """Saves a checkpoint, releases the devices and pauses the run until it is resumed."""
    return _act(request, id, services.run_pause)


@router.post(
    "/{int:id}/resume",
    response=RunOut,
    auth=require_scope("runs"),
    summary="Resume a run",
)
def run_resume(request: HttpRequest, id: int) -> Any:
    """Queues a paused run; it continues from its newest checkpoint."""
    return _act(request, id, services.run_resume)


@router.post(
    "/{int:id}/retry",
    response=RunOut,
    auth=require_scope("runs"),
    summary="Retry a run",
)
def run_retry(request: HttpRequest, id: int, body: Retry | None = None) -> Any:
    """Queues an ended run for another attempt, from its newest checkpoint.

    With `step`, rewinds: continues from that checkpoint and discards the steps after it.
    """
    if body is None or body.step is None:
        return _act(request, id, services.run_retry)
    rewound = services.run_rewind(run=get_run(request, id), by=user(request), step=body.step)
    return selectors.serialize_run(rewound)


@router.post(
    "/{int:id}/checkpoint",
    response=RunOut,
    auth=require_scope("runs"),
    summary="Save a checkpoint",
)
def run_checkpoint(request: HttpRequest, id: int) -> Any:
    """Requests a checkpoint at the next step; a `checkpoint_saved` event reports it."""
    return _act(request, id, services.run_checkpoint)


@router.post(
    "/{int:id}/profile",
    response=RunOut,
    auth=require_scope("runs"),
    summary="Profile a step",
)
def run_profile(request: HttpRequest, id: int) -> Any:
    """Profiles the next step with torch's profiler, on one rank per pipeline stage.

    Produces artifacts and `profile_saved` events.
    """
    return _act(request, id, services.run_profile)


@router.post(
    "/{int:id}/memory-snapshot",
    response=RunOut,
    auth=require_scope("runs"),
    summary="Take a memory snapshot",
)
def run_memory_snapshot(request: HttpRequest, id: int) -> Any:
    """Records what uses memory in the next step, on one rank per pipeline stage.

    Produces artifacts and `memory_profile` events with the peak by category. Uses torch's
    MemTracker on a CPU; on a GPU the allocator's counters and its history for
    pytorch.org/memory_viz.
    """
    return _act(request, id, services.run_memory_snapshot)


@router.post(
    "/{int:id}/checkpoints/{int:step}/pin",
    response=CheckpointOut,
    auth=require_scope("runs"),
    summary="Pin a checkpoint",
)
def checkpoint_pin(request: HttpRequest, id: int, step: int) -> Any:
    """Protects a retained checkpoint from garbage collection."""
    return selectors.serialize_checkpoint(
        storage.checkpoint_pin(run=get_run(request, id), step=step, by=user(request))
    )


@router.post(
    "/{int:id}/checkpoints/{int:step}/unpin",
    response=CheckpointOut,
    auth=require_scope("runs"),
    summary="Unpin a checkpoint",
)
def checkpoint_unpin(request: HttpRequest, id: int, step: int) -> Any:
    """Lets garbage collection delete the checkpoint."""
    return selectors.serialize_checkpoint(
        storage.checkpoint_pin(run=get_run(request, id), step=step, by=user(request), pinned=False)
    )


@router.post(
    "/{int:id}/clone",
    response={201: RunOut},
    auth=require_scope("runs"),
    summary="Clone a run",
)
@creates(RunOut, location=LOCATION)
def run_clone(request: HttpRequest, id: int, body: Clone | None = None) -> Any:
    """Submits a new run with the same spec, changed by `spec`."""
    clone = services.run_clone(
        run=get_run(request, id), by=user(request), changes=(body.spec if body else None) or None
    )
    return selectors.serialize_run(clone)


@router.post(
    "/{int:id}/fork",
    response={201: RunOut},
    auth=require_scope("runs"),
    summary="Fork a run",
)
@creates(RunOut, location=LOCATION)
def run_fork(request: HttpRequest, id: int, body: Fork) -> Any:
    """Submits a new run that continues from a checkpoint of this run.

    `spec` is a merge patch (RFC 7396) and may change the plan. 422 lists the steps with retained
    checkpoints.
    """
    fork = services.run_fork(
        run=get_run(request, id),
        by=user(request),
        step=body.step,
        changes=body.spec,
        name=body.name.strip() or None,
        force=body.force,
    )
    return selectors.serialize_run(fork)


def _default_name(spec: dict[str, Any]) -> str:
    """`train llama-tiny`: kind and model."""
    own = spec.get("kind") in ("external", "script")  # the user's own programs
    model = spec.get("model", "" if own else "llama-tiny")
    if isinstance(model, dict):
        model = model.get("name") or model.get("path") or model.get("package") or ""
    return f"{spec.get('kind', 'run')} {model}".strip()[:160]


def _act(request: HttpRequest, id: int, service: Any) -> Any:
    return selectors.serialize_run(service(run=get_run(request, id), by=user(request)))


def _response(request: HttpRequest, run: Any) -> HttpResponse:
    spent, _ = scheduling.device_time_of_run(run)
    document = selectors.serialize_run(run) | {"device_time": spent.to_dict() if spent else None}
    body = RunOut.model_validate(document).model_dump(mode="json")
    return etag_response(request, body, run.version)
