"""The runs list: what ran, what runs, what was it worth.

Reads selectors, calls services for the chosen rows.
"""

from __future__ import annotations

from typing import Any

from django.contrib import messages
from django.http import HttpResponse
from django.shortcuts import redirect, render
from django.urls import reverse
from django.utils import timezone
from django.views.decorators.http import require_GET, require_POST

from orchestrator.common import live
from orchestrator.common.errors import Refusal, invalid
from orchestrator.runs import selectors, services
from orchestrator.telemetry import selectors as telemetry
from webui.forms.run_filters import LIVE_STATES, RunFilters
from webui.presentation import formatting
from webui.presentation.run_facts import ANSWERING
from webui.views.access import PageRequest, back, page
from webui.views.compare import MOST as COMPARED
from workers.contracts.specs.run import KINDS

PAGE = 50
BULK = 200


@page
@require_GET
def runs(request: PageRequest) -> HttpResponse:
    """Keyset by id, newest first; the counts are of everything the person may see, not of the page."""
    filters = RunFilters.read(request.GET)
    # before the rows are read: frames repeat, never miss
    epoch, seq = live.heads(["fleet"]).get("fleet", ("", 0))
    visible = selectors.runs_visible_to(user=request.user)
    found = selectors.run_list(
        user=request.user, before_id=filters.before, limit=PAGE + 1, within=visible, **filters.asked
    )
    rows, older = found[:PAGE], found[PAGE - 1].pk if len(found) > PAGE else None
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
        "asked": filters.asked_chips(),
        "mine": filters.url(owner="" if filters.owner == "me" else "me"),
        "here": request.get_full_path(),
        "head": {"epoch": epoch, "seq": seq},
        "live": filters.before is None,
    }
    return render(request, "webui/runs.html", context)


@page
@require_POST
def bulk(request: PageRequest) -> HttpResponse:
    """Compares the chosen runs, or cancels or tags them one by one; those that refuse are told by
    name.
    """
    ids = [int(one) for one in request.POST.getlist("run") if one.isdecimal()][:BULK]
    action, tag = request.POST.get("action", ""), request.POST.get("tag", "").strip()
    done, refused = 0, []
    if action == "compare" and ids:
        return redirect(
            f"{reverse('runs-compare')}?runs={','.join(map(str, sorted(ids[:COMPARED])))}"
        )
    if action not in ("cancel", "tag", "compare"):
        raise invalid(
            "action", f"{action!r} is not possible for several runs", "compare, cancel or tag"
        )
    if action == "tag" and not 1 <= len(tag) <= 60:
        messages.error(request, "Type the tag, 1 to 60 characters, before you press Tag.")
        return redirect(back(request, "runs"))
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
    did = "asked to end" if action == "cancel" else f"tagged {tag}"
    if done:
        messages.success(request, f"{formatting.count(done, 'run')} {did}.")
    for says in refused[:5]:
        messages.error(request, says)
    if not ids:
        messages.warning(request, "Choose runs by their boxes first.")
    return redirect(back(request, "runs"))


def row(run: Any, spark: list[float]) -> dict[str, Any]:
    """A run as its line shows it; what is not known yet is None."""
    summary = run.summary or {}
    ended = run.ended or timezone.now()
    held_s = (ended - run.started).total_seconds() if run.started and run.devices else None
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
        "device_hours": run.devices * held_s / 3600 if held_s is not None else None,
        "answers": answers(run.kind, summary),
        "tags": [item.name for item in run.tags.all()],
        "alive": run.state in LIVE_STATES,
    }


def answers(kind: str, summary: dict[str, Any]) -> dict[str, str] | None:
    """What stands in the places of loss and MFU for runs that answer: how soon, how fast, how many
    tokens a second.
    """
    if kind not in ANSWERING:
        return None
    first, pace = (
        formatting.number(summary.get(f"inference/{name}")) for name in ("ttft_s", "tpot_s")
    )
    told = [
        f"first {formatting.seconds(first, 2)}" if first else "",
        f"{formatting.seconds(pace, 2)}/token" if pace else "",
    ]
    speed = formatting.number(summary.get("inference/tokens_per_s"))
    return {
        "latency": " · ".join(part for part in told if part),
        "speed": f"{formatting.quantity(speed)} tok/s" if speed is not None else "",
    }


def sentence(counts: dict[str, int]) -> str:
    """What runs, what waits, what came of the rest, in one line."""
    if not counts:
        return "Nothing ran here yet."
    running = counts.get("running", 0) + counts.get("starting", 0) + counts.get("stopping", 0)
    parts = [f"{formatting.count(running, 'run')} in flight" if running else "nothing in flight"]
    if counts.get("queued"):
        parts.append(f"{counts['queued']:,} waiting")
    if counts.get("paused"):
        parts.append(f"{counts['paused']:,} paused")
    ended = {name: counts.get(name, 0) for name in ("finished", "failed", "cancelled")}
    told = formatting.listed([f"{count:,} {name}" for name, count in ended.items() if count])
    text = ", ".join(parts) + (f"; {told} before that." if told else ".")
    return text[0].upper() + text[1:]
