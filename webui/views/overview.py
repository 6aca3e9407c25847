"""Overview page: fleet headline, runs, devices, queue, events, usage; `pulse` is the live part."""

from __future__ import annotations

from datetime import timedelta
from typing import Any, Final

from django.http import HttpRequest, HttpResponse
from django.shortcuts import render
from django.utils import timezone
from django.utils.translation import gettext as _
from django.utils.translation import gettext_noop

from orchestrator.accounts.roles import Role
from orchestrator.common import live
from orchestrator.fleet import selectors as fleet
from orchestrator.runs import selectors as runs
from orchestrator.scheduling import selectors as scheduling
from orchestrator.telemetry import selectors as telemetry
from webui.charts import devices, week
from webui.presentation import event_messages, formatting, run_headlines
from webui.presentation.run_facts import ANSWERING
from webui.views.access import has_role, page

CARDS: Final = 12
EVENTS: Final = 40
STREAMS: Final = {
    "": (gettext_noop("all"), None),
    "troubles": (
        gettext_noop("problems"),
        [
            "non_finite",
            "out_of_memory",
            "hang",
            "straggler",
            "rank_exited",
            "node_lost",
            "preempted",
        ],
    ),
    "checkpoints": (gettext_noop("checkpoints"), ["checkpoint_saved", "checkpoint_restored"]),
    "states": (gettext_noop("states"), ["state_changed"]),
    "precision": (gettext_noop("loss scale"), ["loss_scale_changed", "overflow_skipped_step"]),
}


@page
def overview(request: HttpRequest) -> HttpResponse:
    """Show the overview."""
    return render(request, "webui/overview.html", content(request))


@page
def pulse(request: HttpRequest) -> HttpResponse:
    """Render the live parts of an open page."""
    return render(request, "webui/overview/parts.html", content(request))


def content(request: HttpRequest) -> dict[str, Any]:
    """Return the template context of the page and its live part."""
    user: Any = request.user
    # read first: frames may repeat but are never missed
    epoch, seq = live.heads(["fleet"]).get("fleet", ("", 0))
    fleet_view = scheduling.overview(user=user)
    own = [run for run in fleet_view.running if run.owner_id == user.pk]
    mine = request.GET.get("runs", "mine" if own else "all") == "mine"
    stream = request.GET.get("events", "")
    now = timezone.now()
    nodes = list(fleet.nodes_visible_to(user=user))
    return {
        "sentence": run_headlines.overview(
            busy=fleet_view.busy,
            devices=fleet_view.devices,
            runs=len(fleet_view.running),
            waiting=len(fleet_view.waiting),
            waiting_devices=fleet_view.waiting_devices,
            troubles=fleet_view.troubles,
        ),
        "busy": fleet_view.busy,
        "grid": grid(nodes, fleet_view.running),
        "cards": cards(own if mine else fleet_view.running),
        "more_cards": max(0, len(own if mine else fleet_view.running) - CARDS),
        "mine": mine,
        "own": len(own),
        "everyone": len(fleet_view.running),
        "queue": fleet_view.waiting[:8],
        "more_queue": max(0, len(fleet_view.waiting) - 8),
        "events": list_events(user, stream),
        "streams": [
            {"key": key, "title": _(title), "on": key == stream}
            for key, (title, _types) in STREAMS.items()
        ],
        "days": (days := usage(now, fleet_view.devices)),
        "days_sentence": week.summarize(days),
        "may_submit": has_role(user, Role.SUBMITTER),
        "may_join": has_role(user, Role.OPERATOR),
        "no_nodes": not nodes,
        "epoch": epoch,
        "seq": seq,
    }


def grid(nodes: list[Any], visible: list[Any]) -> list[dict[str, Any]]:
    """Return nodes with their devices' marks; runs that the user may not see are anonymous."""
    allocations = scheduling.allocations_by_device()
    known = {run.pk: run for run in visible}
    return [
        {
            "name": node.name,
            "health": "drained" if node.drained and node.health == "up" else node.health,
            "marks": [
                _mark(node, device, allocations.get(device.pk), known)
                for device in sorted(node.devices.all(), key=lambda device: device.index)
            ],
        }
        for node in nodes
    ]


def _mark(node: Any, device: Any, allocation: Any, known: dict[int, Any]) -> devices.Mark:
    sample = next(
        (row for row in node.sample.get("devices", []) if row.get("index") == device.index), None
    )
    run = None
    if allocation is not None:
        holder = allocation.attempt.run
        summary = holder.summary
        last = summary.get("time")
        run = {
            "id": holder.pk if holder.pk in known else None,
            "name": holder.name if holder.pk in known else "",
            "state": holder.state,
            "owner": holder.owner.username,
            "mfu": summary.get("mfu"),
            "step_time_s": summary.get("step_time_s"),
            "age_s": timezone.now().timestamp() - last if isinstance(last, int | float) else None,
        }
        if run["id"] is None:
            run |= {"id": "", "name": _("of another team")}
    return devices.mark(
        node=node.name,
        health=node.health,
        drained=node.drained,
        index=device.index,
        healthy=device.healthy,
        memory_bytes=device.memory_bytes,
        sample=sample,
        run=run,
    )


def cards(shown: list[Any]) -> list[dict[str, Any]]:
    """Return cards of active runs with loss curve, progress and ETA."""
    shown = shown[:CARDS]
    curves = telemetry.sparkline(
        run_ids=[run.pk for run in shown if run.kind not in ANSWERING], name="loss"
    )
    if answering := [run.pk for run in shown if run.kind in ANSWERING]:
        curves |= telemetry.sparkline(run_ids=answering, name="inference/tokens_per_s")
    result = []
    for run in shown:
        step, steps = run.summary.get("step"), run.summary.get("steps")
        result.append(
            {
                "run": run,
                "plan": run.plan,
                "summary": run.summary,
                "serving": _serving(run.summary) if run.kind in ANSWERING else None,
                "part": f"{100 * step / steps:.1f}" if step is not None and steps else "",
                "curve": ",".join(f"{value:.5g}" for value in curves.get(run.pk, [])),
            }
        )
    return result


def _serving(summary: dict[str, Any]) -> dict[str, str]:
    values = {
        name: summary.get(f"inference/{name}")
        for name in ("ttft_s", "tpot_s", "tokens_per_s", "running")
    }
    return {
        "first": formatting.seconds(values["ttft_s"]),
        "per_token": formatting.seconds(values["tpot_s"]),
        "speed": formatting.quantity(values["tokens_per_s"]),
        "running": formatting.quantity(values["running"]),
    }


def list_events(user: Any, stream: str) -> list[event_messages.EventMessage]:
    """Return the newest events of a stream, newest first."""
    types = STREAMS.get(stream, STREAMS[""])[1]
    rows = runs.events_visible_to(
        user=user, types=types, limit=EVENTS, without=event_messages.NOT_LISTED
    )
    shown = [event for event in rows if stream or not _minor(event)]
    return [event_messages.event_message(event, event.run.name) for event in shown]


def _minor(event: Any) -> bool:
    """Whether only the run page lists the event: attempts' states, plans, measured peaks."""
    return bool(
        event.type in ("plan_resolved", "peak_measured", "recompute_chosen", "weights_loaded")
        or (event.type == "state_changed" and event.data.get("of") == "attempt")
    )


def usage(now: Any, capacity: int) -> list[week.Day]:
    """Return device-hours and MFU of the last seven days."""
    since = (now - timedelta(days=week.DAYS - 1)).replace(hour=0, minute=0, second=0, microsecond=0)
    held = [
        week.Held(row.created, row.released or now, _mfu(row.attempt.run.summary))
        for row in scheduling.allocations(since=since)
    ]
    return week.week(held, devices=capacity, now=now)


def _mfu(summary: dict[str, Any]) -> float | None:
    mfu = summary.get("mfu")
    return float(mfu) if isinstance(mfu, int | float) else None
