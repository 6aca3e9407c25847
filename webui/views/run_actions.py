"""The buttons of a run's page: each a POST that calls one service and comes back with a sentence."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from django.contrib import messages
from django.http import HttpRequest, HttpResponse
from django.shortcuts import redirect
from django.views.decorators.http import require_POST

from orchestrator.common.errors import Refusal, invalid
from orchestrator.planner.store import selectors as planner
from orchestrator.planner.store import services as planner_services
from orchestrator.runs import selectors, services
from orchestrator.telemetry import outcome
from webui.views.access import page


@require_POST
@page
def act(request: HttpRequest, id: int) -> HttpResponse:
    """`action` names what to do; a refusal is told on the page one came from."""
    run = selectors.run_get(user=_user(request), id=id)
    action = ACTIONS.get(request.POST.get("action", ""))
    if action is None:
        raise invalid(
            "action", f"{request.POST.get('action', '')!r} is not an action", ", ".join(ACTIONS)
        )
    try:
        shown, says = action(run, request)
    except Refusal as refusal:
        messages.error(request, refusal.detail)
        shown = run
    else:
        messages.success(request, says)
    return redirect("run", shown.pk)


def _user(request: HttpRequest) -> Any:
    return request.user


def _simple(
    service: Callable[..., Any], says: str
) -> Callable[[Any, HttpRequest], tuple[Any, str]]:
    def do(run: Any, request: HttpRequest) -> tuple[Any, str]:
        return service(run=run, by=_user(request)), says

    return do


def _clone(run: Any, request: HttpRequest) -> tuple[Any, str]:
    made = services.run_clone(run=run, by=_user(request))
    return made, f"This is run {made.pk}, a clone of run {run.pk}."


def _rewind(run: Any, request: HttpRequest) -> tuple[Any, str]:
    step = request.POST.get("step", "")
    if not step.isdecimal():
        raise invalid("step", f"{step!r} is not a step", "the step of a checkpoint")
    made = services.run_rewind(run=run, by=_user(request), step=int(step))
    return made, f"Rewound; it goes on from step {int(step):,}."


def _priority(run: Any, request: HttpRequest) -> tuple[Any, str]:
    try:
        priority = int(request.POST.get("priority", ""))
    except ValueError:
        raise invalid("priority", "it is a whole number", "0") from None
    return services.run_update(
        run=run, by=_user(request), priority=priority
    ), f"Priority is {priority} now."


def _notes(run: Any, request: HttpRequest) -> tuple[Any, str]:
    tags = [tag.strip() for tag in request.POST.get("tags", "").split(",") if tag.strip()]
    changed = services.run_update(
        run=run, by=_user(request), tags=tags, notes=request.POST.get("notes", "")
    )
    return changed, "Notes and tags are saved."


def _calibrate(run: Any, request: HttpRequest) -> tuple[Any, str]:
    """Fits the device's default calibration anew with this run, or begins one; predictions rest on
    it from now on.
    """
    lines = outcome.measurement_lines(run=run)
    if isinstance(lines, str):
        raise invalid("run", lines, "training runs that logged their steps, or benchmarks")
    device = str((run.prediction or {}).get("device") or "cpu")
    known = planner.calibration_default(device=device)
    made = planner_services.calibration_add(
        by=_user(request),
        name=known.name if known else f"{device}, measured here",
        measurements=lines,
        onto=known,
        default=True,
        devices=planner.own_devices(user=_user(request)),
    )
    return (
        run,
        f"Predictions for {device} rest on {made.name} now, fitted to {made.rows} measured run(s).",
    )


ACTIONS: dict[str, Callable[[Any, HttpRequest], tuple[Any, str]]] = {
    "cancel": _simple(services.run_cancel, "Asked to stop; its checkpoints stay."),
    "pause": _simple(services.run_pause, "Asked to save a checkpoint and leave its devices."),
    "resume": _simple(services.run_resume, "Queued again; it goes on from its newest checkpoint."),
    "retry": _simple(services.run_retry, "Queued for another attempt."),
    "profile": _simple(
        services.run_profile,
        "Asked for a profile of the next step; an event tells when it is saved.",
    ),
    "memory-snapshot": _simple(
        services.run_memory_snapshot,
        "Asked what holds memory in the next step; an event tells when it is saved.",
    ),
    "checkpoint": _simple(
        services.run_checkpoint, "Asked for a checkpoint; an event tells when it is saved."
    ),
    "clone": _clone,
    "rewind": _rewind,
    "priority": _priority,
    "notes": _notes,
    "calibrate": _calibrate,
}
