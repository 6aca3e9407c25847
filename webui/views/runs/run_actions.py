"""Actions of the run page: each POST calls one service and redirects with a message."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from django.contrib import messages
from django.http import HttpRequest, HttpResponse
from django.shortcuts import redirect
from django.utils.translation import gettext as _
from django.utils.translation import gettext_noop
from django.views.decorators.http import require_POST

from orchestrator.common.errors import Refusal, invalid
from orchestrator.common.units import is_id
from orchestrator.planner.store import selectors as planner
from orchestrator.planner.store import services as planner_services
from orchestrator.reviews import answer_votes
from orchestrator.runs import selectors, services, storage
from orchestrator.telemetry import outcome
from webui.views.access import page


@require_POST
@page
def act(request: HttpRequest, id: int) -> HttpResponse:
    """Run the POST's `action`; a refusal becomes a message on the run's page."""
    run = selectors.run_get(user=_user(request), id=id)
    action = ACTIONS.get(request.POST.get("action", ""))
    if action is None:
        raise invalid(
            "action",
            _("%(name)r is not an action") % {"name": request.POST.get("action", "")},
            _("Use one of %(names)s.") % {"names": ", ".join(ACTIONS)},
        )
    try:
        shown, message = action(run, request)
    except Refusal as refusal:
        messages.error(request, refusal.detail)
        shown = run
    else:
        messages.success(request, message)
    return redirect("run", shown.pk)


def _user(request: HttpRequest) -> Any:
    return request.user


def _simple(
    service: Callable[..., Any], message: str
) -> Callable[[Any, HttpRequest], tuple[Any, str]]:
    def do(run: Any, request: HttpRequest) -> tuple[Any, str]:
        return service(run=run, by=_user(request)), _(message)

    return do


def _vote(run: Any, request: HttpRequest) -> tuple[Any, str]:
    example = request.POST.get("example", "")
    if not is_id(example):
        raise invalid(
            "example",
            _("%(name)r is not an example") % {"name": example[:40]},
            _("Use a number such as 0."),
        )
    choice = request.POST.get("choice", "")
    answer_votes.vote(run=run, by=_user(request), example=int(example), choice=choice)
    return run, _("Vote saved.")


def _clone(run: Any, request: HttpRequest) -> tuple[Any, str]:
    new = services.run_clone(run=run, by=_user(request))
    return new, _("Run %(id)s, a clone of run %(source)s.") % {"id": new.pk, "source": run.pk}


def _rewind(run: Any, request: HttpRequest) -> tuple[Any, str]:
    step = request.POST.get("step", "")
    if not step.isdecimal():
        raise invalid(
            "step",
            _("%(value)r is not a step") % {"value": step},
            _("Use the step of a checkpoint."),
        )
    new = services.run_rewind(run=run, by=_user(request), step=int(step))
    return new, _("Rewound; the run continues from step %(step)s.") % {"step": f"{int(step):,}"}


def _pin(run: Any, request: HttpRequest) -> tuple[Any, str]:
    step, pinned = request.POST.get("step", ""), request.POST.get("action") == "pin"
    if not (step.isdecimal() and len(step) < 19):
        raise invalid(
            "step",
            _("%(value)r is not a step") % {"value": step},
            _("Use the step of a checkpoint."),
        )
    storage.checkpoint_pin(run=run, step=int(step), by=_user(request), pinned=pinned)
    text = _("Garbage collection keeps the checkpoint of step %(step)s.")
    if not pinned:
        text = _("The checkpoint of step %(step)s is no longer pinned.")
    return run, text % {"step": f"{int(step):,}"}


def _priority(run: Any, request: HttpRequest) -> tuple[Any, str]:
    try:
        priority = int(request.POST.get("priority", ""))
    except ValueError:
        raise invalid("priority", _("not an integer"), _("Use 0, or a higher number.")) from None
    changed = services.run_update(run=run, by=_user(request), priority=priority)
    return changed, _("Priority is now %(value)s.") % {"value": priority}


def _notes(run: Any, request: HttpRequest) -> tuple[Any, str]:
    tags = [tag.strip() for tag in request.POST.get("tags", "").split(",") if tag.strip()]
    changed = services.run_update(
        run=run, by=_user(request), tags=tags, notes=request.POST.get("notes", "")
    )
    return changed, _("Notes and tags saved.")


def _calibrate(run: Any, request: HttpRequest) -> tuple[Any, str]:
    """Refit the device's default calibration with this run, or create one."""
    lines = outcome.measurement_lines(run=run)
    if isinstance(lines, str):
        raise invalid(
            "run", lines, _("Select training runs that logged their steps, or benchmark runs.")
        )
    device = str((run.prediction or {}).get("device") or "cpu")
    known = planner.calibration_default(device=device)
    new = planner_services.calibration_add(
        by=_user(request),
        name=known.name if known else _("%(device)s, measured here") % {"device": device},
        measurements=lines,
        onto=known,
        default=True,
        devices=planner.own_devices(user=_user(request)),
    )
    return (
        run,
        _("Predictions for %(device)s now use %(name)s, fitted to %(count)s measured runs.")
        % {"device": device, "name": new.name, "count": new.rows},
    )


ACTIONS: dict[str, Callable[[Any, HttpRequest], tuple[Any, str]]] = {
    "vote-answers": _vote,
    "pin": _pin,
    "unpin": _pin,
    "cancel": _simple(services.run_cancel, gettext_noop("Cancelling; checkpoints are kept.")),
    "pause": _simple(
        services.run_pause,
        gettext_noop("Pausing: the run saves a checkpoint and releases its devices."),
    ),
    "resume": _simple(
        services.run_resume,
        gettext_noop("Queued again; the run continues from its newest checkpoint."),
    ),
    "retry": _simple(services.run_retry, gettext_noop("Queued for another attempt.")),
    "profile": _simple(
        services.run_profile,
        gettext_noop("Profile of the next step requested; an event reports when it is saved."),
    ),
    "memory-snapshot": _simple(
        services.run_memory_snapshot,
        gettext_noop(
            "Memory snapshot of the next step requested; an event reports when it is saved."
        ),
    ),
    "checkpoint": _simple(
        services.run_checkpoint,
        gettext_noop("Checkpoint requested; an event reports when it is saved."),
    ),
    "clone": _clone,
    "rewind": _rewind,
    "priority": _priority,
    "notes": _notes,
    "calibrate": _calibrate,
}
