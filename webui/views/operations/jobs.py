"""The page of jobs for operators: schedule, recorded runs, start and dry run."""

from __future__ import annotations

from typing import Any

from django.http import HttpResponse
from django.shortcuts import render
from django.utils.translation import gettext as _
from django.utils.translation import gettext_noop
from django.views.decorators.http import require_GET, require_POST

from orchestrator.accounts.roles import Role
from orchestrator.background_jobs import selectors, services
from webui.views.access import PageRequest, page, redirect_with_message, require_role

SHOWN = 50
_DESCRIPTIONS = {
    "frames": gettext_noop("Deletes live frames and idempotency keys that expired."),
    "notifications": gettext_noop("Collects messages about runs and nodes for subscribers."),
    "secrets": gettext_noop("Encrypts stored secrets again after a change of the secret key."),
    "alerts": gettext_noop("Evaluates alert rules; opens and ends alerts."),
    "sweeps": gettext_noop("Starts, pauses and stops the runs of sweeps."),
    "slow-devices": gettext_noop("Marks devices that slow down the other ranks of a gang."),
    "idle-probes": gettext_noop("Probes nodes that have been idle, one per pool at a time."),
    "exports": gettext_noop("Builds requested exports and deletes expired ones."),
    "data-sets": gettext_noop(
        "Reads the files of registered data sets and copies them into the store."
    ),
    "queue-estimates": gettext_noop("Simulates the queue to estimate when waiting runs start."),
    "simulations": gettext_noop("Runs requested simulations of scheduling policies."),
    "garbage": gettext_noop(
        "Deletes checkpoints and folders of ended runs from the nodes, and measures storage."
    ),
    "store-garbage": gettext_noop(
        "Deletes copies of checkpoints and artifacts from the store by the ORRERY_GC_STORE_… "
        "settings, and those of deleted data sets."
    ),
    "usage": gettext_noop("Stores the device time of each day by person and pool."),
    "retention": gettext_noop("Applies the retention settings to events, logs, series and audit."),
}


@page
@require_GET
def jobs(request: PageRequest) -> HttpResponse:
    """Show the jobs and their newest runs."""
    require_role(request.user, Role.OPERATOR, _("The jobs page"))
    rows: list[dict[str, Any]] = [
        {"job": job, "description": _(_DESCRIPTIONS[job.name])}
        for job in selectors.jobs(user=request.user)
    ]
    failing = sum(row["job"].fails > 0 for row in rows)
    runs = selectors.job_runs(user=request.user)[:SHOWN]
    return render(
        request, "webui/jobs.html", {"rows": rows, "failing": failing, "runs": list(runs)}
    )


@page
@require_POST
def run(request: PageRequest, name: str) -> HttpResponse:
    """Queue a run or dry run of a job."""
    dry_run = request.POST.get("dry_run") == "1"
    services.job_request(name=name, dry_run=dry_run, by=request.user)
    return redirect_with_message(
        request, _("%(name)s is queued; reload this page for its result.") % {"name": name}, "jobs"
    )
