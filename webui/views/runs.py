"""Runs list with filters, live rows and actions on selected runs."""

from __future__ import annotations

from typing import Any

from django.contrib import messages
from django.http import HttpResponse
from django.shortcuts import redirect, render
from django.urls import reverse
from django.utils import timezone
from django.utils.translation import gettext as _
from django.utils.translation import ngettext
from django.views.decorators.http import require_GET, require_POST

from orchestrator.common import live
from orchestrator.common.errors import Refusal, invalid
from orchestrator.runs import selectors, services
from orchestrator.telemetry import selectors as telemetry
from webui.forms.run_filters import LIVE_STATES, RunFilters
from webui.presentation import formatting
from webui.presentation.run_facts import ANSWERING
from webui.views.access import PageRequest, next_url, page
from webui.views.compare import MOST as COMPARED
from workers.contracts.specs.run import KINDS

PAGE = 50
BULK = 200


@page
@require_GET
def runs(request: PageRequest) -> HttpResponse:
    """List runs, newest first, paged by id; counts cover all visible runs, not only the page."""
    filters = RunFilters.read(request.GET)
    # read before the rows: frames may repeat but are never missed
    epoch, seq = live.heads(["fleet"]).get("fleet", ("", 0))
    visible = selectors.runs_visible_to(user=request.user)
    matches = selectors.run_list(
        user=request.user,
        before_id=filters.before,
        limit=PAGE + 1,
        within=visible,
        **filters.active,
    )
    rows, older = matches[:PAGE], matches[PAGE - 1].pk if len(matches) > PAGE else None
    counts = selectors.state_counts(user=request.user, within=visible)
    sparks = telemetry.sparkline(
        run_ids=[run.pk for run in rows if run.kind not in ANSWERING], name="loss"
    )
    if answering := [run.pk for run in rows if run.kind in ANSWERING]:
        sparks |= telemetry.sparkline(run_ids=answering, name="inference/tokens_per_s")
    context = {
        "rows": [row(run, sparks.get(run.pk, [])) for run in rows],
        "filters": filters,
        "older": filters.url(before=older) if older else "",
        "newest": filters.url(),
        "counts": counts,
        "total": sum(counts.values()),
        "sentence": sentence(counts),
        "kinds": KINDS,
        "chips": filters.state_chips(counts),
        "active_chips": filters.active_chips(),
        "mine": filters.url(owner="" if filters.owner == "me" else "me"),
        "here": request.get_full_path(),
        "head": {"epoch": epoch, "seq": seq},
        "live": filters.before is None,
    }
    return render(request, "webui/runs.html", context)


@page
@require_POST
def bulk(request: PageRequest) -> HttpResponse:
    """Compare, cancel or tag the selected runs; refusals are reported per run."""
    ids = [int(text) for text in request.POST.getlist("run") if text.isdecimal()][:BULK]
    action, tag = request.POST.get("action", ""), request.POST.get("tag", "").strip()
    done, refused = 0, list[str]()
    if action == "compare" and ids:
        return redirect(
            f"{reverse('runs-compare')}?runs={','.join(map(str, sorted(ids[:COMPARED])))}"
        )
    if action not in ("cancel", "tag", "compare"):
        raise invalid(
            "action",
            _("%(name)r is not possible for several runs") % {"name": action},
            _("Use compare, cancel or tag"),
        )
    if action == "tag" and not 1 <= len(tag) <= 60:
        messages.error(request, _("Enter a tag of 1 to 60 characters first."))
        return redirect(next_url(request, "runs"))
    for id in ids if action != "compare" else ():
        try:
            run = selectors.run_get(user=request.user, id=id)
            if action == "cancel":
                services.run_cancel(run=run, by=request.user)
            else:
                tags = sorted({*(item.name for item in run.tags.all()), tag})
                services.run_update(run=run, by=request.user, tags=tags)
            done += 1
        except Refusal as refusal:
            refused.append(f"{id}: {refusal.detail}")
    if done and action == "cancel":
        text = ngettext("Cancelling %(count)s run.", "Cancelling %(count)s runs.", done)
        messages.success(request, text % {"count": done})
    elif done:
        text = ngettext("Tagged %(count)s run %(tag)s.", "Tagged %(count)s runs %(tag)s.", done)
        messages.success(request, text % {"count": done, "tag": tag})
    for message in refused[:5]:
        messages.error(request, message)
    if not ids:
        messages.warning(request, _("Select runs first."))
    return redirect(next_url(request, "runs"))


def row(run: Any, spark: list[float]) -> dict[str, Any]:
    """Return a run as its table row; unknown values are None."""
    summary = run.summary or {}
    ended = run.ended or timezone.now()
    allocated_s = (ended - run.started).total_seconds() if run.started and run.devices else None
    steps = summary.get("steps") or ((run.spec.get("train") or {}).get("steps"))
    step = summary.get("step")
    return {
        "run": run,
        "loss": summary.get("loss"),
        "mfu": summary.get("mfu"),
        "tokens": summary.get("tokens"),
        "step": step,
        "steps": steps,
        "part": round(100 * step / steps, 1) if step and steps else None,
        "spark": ",".join(f"{value:.5g}" for value in spark),
        "device_hours": run.devices * allocated_s / 3600 if allocated_s is not None else None,
        "serving": serving_metrics(run.kind, summary),
        "tags": [item.name for item in run.tags.all()],
        "alive": run.state in LIVE_STATES,
    }


def serving_metrics(kind: str, summary: dict[str, Any]) -> dict[str, str] | None:
    """Return latency and speed, which inference runs show in place of loss and MFU."""
    if kind not in ANSWERING:
        return None
    first, per_token = (
        formatting.number(summary.get(f"inference/{name}")) for name in ("ttft_s", "tpot_s")
    )
    latencies = [
        f"TTFT {formatting.seconds(first, 2)}" if first else "",
        f"TPOT {formatting.seconds(per_token, 2)}" if per_token else "",
    ]
    speed = formatting.number(summary.get("inference/tokens_per_s"))
    return {
        "latency": " · ".join(part for part in latencies if part),
        "speed": _("%(rate)s tokens/s") % {"rate": formatting.quantity(speed)}
        if speed is not None
        else "",
    }


def sentence(counts: dict[str, int]) -> str:
    """Summarize runs by state in one sentence."""
    if not counts:
        return _("No runs yet.")
    active = counts.get("running", 0) + counts.get("starting", 0) + counts.get("stopping", 0)
    parts = [
        ngettext("%(count)s active run", "%(count)s active runs", active) % {"count": f"{active:,}"}
        if active
        else _("No active runs")
    ]
    if counts.get("queued"):
        parts.append(_("%(count)s waiting") % {"count": f"{counts['queued']:,}"})
    if counts.get("paused"):
        parts.append(_("%(count)s paused") % {"count": f"{counts['paused']:,}"})
    ended = {name: counts.get(name, 0) for name in ("finished", "failed", "cancelled")}
    text = ", ".join(parts)
    if any(ended.values()):
        listed = [f"{count:,} {_(name)}" for name, count in ended.items() if count]
        text += f"; {formatting.listed(listed)}"
    return text + "."
