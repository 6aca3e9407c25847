"""The overview: is the fleet busy with the right things, and is anything wrong?

`pulse` is its changing part.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any, Final

from django.http import HttpRequest, HttpResponse
from django.shortcuts import render
from django.utils import timezone

from orchestrator.accounts.roles import Role
from orchestrator.common import live
from orchestrator.fleet import selectors as fleet
from orchestrator.runs import selectors as runs
from orchestrator.scheduling import selectors as scheduling
from orchestrator.telemetry import selectors as telemetry
from webui.charts import devices, week
from webui.presentation import event_messages, formatting, run_headlines
from webui.presentation.run_facts import ANSWERING
from webui.views.access import may, page

CARDS: Final = 12
EVENTS: Final = 40
STREAMS: Final = {
    "": ("all", None),
    "troubles": (
        "troubles",
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
    "checkpoints": ("checkpoints", ["checkpoint_saved", "checkpoint_restored"]),
    "states": ("states", ["state_changed"]),
    "precision": ("loss scale", ["loss_scale_changed", "overflow_skipped_step"]),
}


@page
def overview(request: HttpRequest) -> HttpResponse:
    return render(request, "webui/overview.html", content(request))


@page
def pulse(request: HttpRequest) -> HttpResponse:
    """The same parts without the frame around them, for a page that is open."""
    return render(request, "webui/overview/parts.html", content(request))


def content(request: HttpRequest) -> dict[str, Any]:
    user: Any = request.user
    # before anything else is read: frames repeat, never miss
    epoch, seq = live.heads(["fleet"]).get("fleet", ("", 0))
    seen = scheduling.overview(user=user)
    own = [run for run in seen.running if run.owner_id == user.pk]
    mine = request.GET.get("runs", "mine" if own else "all") == "mine"
    stream = request.GET.get("events", "")
    now = timezone.now()
    nodes = list(fleet.nodes_visible_to(user=user))
    return {
        "sentence": run_headlines.overview(
            busy=seen.busy,
            devices=seen.devices,
            runs=len(seen.running),
            waiting=len(seen.waiting),
            waiting_devices=seen.waiting_devices,
            troubles=seen.troubles,
        ),
        "busy": seen.busy,
        "grid": grid(nodes, seen.running),
        "cards": cards(own if mine else seen.running),
        "more_cards": max(0, len(own if mine else seen.running) - CARDS),
        "mine": mine,
        "own": len(own),
        "everyone": len(seen.running),
        "queue": seen.waiting[:8],
        "more_queue": max(0, len(seen.waiting) - 8),
        "moments": stream_of(user, stream),
        "streams": [
            {"key": key, "title": title, "on": key == stream} for key, (title, _) in STREAMS.items()
        ],
        "days": (days := use(now, seen.devices)),
        "days_sentence": week.sentence(days),
        "may_submit": may(user, Role.SUBMITTER),
        "may_join": may(user, Role.OPERATOR),
        "no_nodes": not nodes,
        "epoch": epoch,
        "seq": seq,
    }


def grid(nodes: list[Any], visible: list[Any]) -> list[dict[str, Any]]:
    """Each node with its devices' marks; a run that the person may not see is told as somebody
    else's.
    """
    held = scheduling.allocations_by_device()
    known = {run.pk: run for run in visible}
    return [
        {
            "name": node.name,
            "health": "drained" if node.drained and node.health == "up" else node.health,
            "marks": [
                _mark(node, device, held.get(device.pk), known)
                for device in sorted(node.devices.all(), key=lambda one: one.index)
            ],
        }
        for node in nodes
    ]


def _mark(node: Any, device: Any, allocation: Any, known: dict[int, Any]) -> devices.Mark:
    sample = next(
        (one for one in node.sample.get("devices", []) if one.get("index") == device.index), None
    )
    run = None
    if allocation is not None:
        held = allocation.attempt.run
        summary = held.summary
        last = summary.get("time")
        run = {
            "id": held.pk if held.pk in known else None,
            "name": held.name if held.pk in known else "",
            "state": held.state,
            "owner": held.owner.username,
            "mfu": summary.get("mfu"),
            "step_time_s": summary.get("step_time_s"),
            "age_s": timezone.now().timestamp() - last if isinstance(last, int | float) else None,
        }
        if run["id"] is None:
            run |= {"id": "", "name": "of another team"}
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
    """Runs in flight with their loss curve, progress and time to go."""
    shown = shown[:CARDS]
    curves = telemetry.sparkline(
        run_ids=[run.pk for run in shown if run.kind not in ANSWERING], name="loss"
    )
    if answering := [run.pk for run in shown if run.kind in ANSWERING]:
        curves |= telemetry.sparkline(run_ids=answering, name="inference/tokens_per_s")
    made = []
    for run in shown:
        step, steps = run.summary.get("step"), run.summary.get("steps")
        made.append(
            {
                "run": run,
                "plan": run.plan,
                "summary": run.summary,
                "answers": _answers(run.summary) if run.kind in ANSWERING else None,
                "part": f"{100 * step / steps:.1f}" if step is not None and steps else "",
                "curve": ",".join(f"{value:.5g}" for value in curves.get(run.pk, [])),
            }
        )
    return made


def _answers(summary: dict[str, Any]) -> dict[str, str]:
    found = {
        name: summary.get(f"inference/{name}")
        for name in ("ttft_s", "tpot_s", "tokens_per_s", "running")
    }
    return {
        "first": formatting.seconds(found["ttft_s"]),
        "pace": formatting.seconds(found["tpot_s"]),
        "speed": formatting.quantity(found["tokens_per_s"]),
        "running": formatting.quantity(found["running"]),
    }


def stream_of(user: Any, stream: str) -> list[event_messages.Moment]:
    types = STREAMS.get(stream, STREAMS[""])[1]
    found = runs.events_visible_to(
        user=user, types=types, limit=EVENTS, without=event_messages.DRAWN
    )
    shown = [event for event in found if stream or not _small(event)]
    return [event_messages.moment(event, event.run.name) for event in shown]


def _small(event: Any) -> bool:
    """Steps on the way that the run's own page tells: attempts' moves, plans, measured peaks."""
    return bool(
        event.type in ("plan_resolved", "peak_measured", "recompute_chosen", "weights_loaded")
        or (event.type == "state_changed" and event.data.get("of") == "attempt")
    )


def use(now: Any, capacity: int) -> list[week.Day]:
    since = (now - timedelta(days=week.DAYS - 1)).replace(hour=0, minute=0, second=0, microsecond=0)
    held = [
        week.Held(one.created, one.released or now, _mfu(one.attempt.run.summary))
        for one in scheduling.allocations(since=since)
    ]
    return week.week(held, devices=capacity, now=now)


def _mfu(summary: dict[str, Any]) -> float | None:
    mfu = summary.get("mfu")
    return float(mfu) if isinstance(mfu, int | float) else None
