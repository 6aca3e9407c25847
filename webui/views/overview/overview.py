"""Overview page: fleet headline, runs, devices, queue, events, usage; `pulse` is the live part."""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Final, NamedTuple

from django.http import HttpRequest, HttpResponse
from django.shortcuts import render
from django.utils import timezone
from django.utils.translation import get_language, gettext_noop
from django.utils.translation import gettext as _

from orchestrator.accounts import selectors as people
from orchestrator.accounts.roles import Role
from orchestrator.common import live
from orchestrator.runs import selectors as runs
from orchestrator.scheduling import selectors as scheduling
from orchestrator.telemetry import selectors as telemetry
from webui.charts import week
from webui.presentation import device_time, event_messages, formatting, run_headlines
from webui.presentation.run_facts import ANSWERING
from webui.shared_parts import SharedByKey, SharedPart
from webui.views import outages
from webui.views.access import has_role, page
from webui.views.overview import overview_devices
from webui.views.overview.failed_runs import FailedRuns, failed_runs

CARDS: Final = 12
WAITING: Final = 8
EVENTS: Final = 40
RECENT: Final = 5  # ended runs, while none is active
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
            "node_cordoned",
            "preempted",
            "resize_requested",
            "resized",
            "disk_full",
            "store_problem",
            "telemetry_dropped",
        ],
    ),
    "checkpoints": (
        gettext_noop("checkpoints"),
        ["checkpoint_saved", "checkpoint_restored", "checkpoint_stored"],
    ),
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
    stream = request.GET.get("events", "")
    shared = shared_parts(user, stream if stream in STREAMS else "")
    seen, used = shared.seen, _usage.get()
    own, own_count = scheduling.own_active(user=user, runs_shown=CARDS)
    mine = request.GET.get("runs", "mine" if own_count else "all") == "mine"
    failed = failed_runs(user, mine=True) if mine else shared.failed
    shown, active = (own, own_count) if mine else (seen.running, seen.active)
    return {
        "sentence": run_headlines.overview(
            busy=seen.busy,
            devices=seen.devices,
            runs=seen.active,
            waiting=seen.queue.runs,
            waiting_devices=seen.queue.devices,
            troubles=outages.troubles(),
            failed=len(failed.rows) + failed.more,
        ),
        "busy": seen.busy,
        **overview_devices.device_context(user),
        "cards": cards(own) if mine else shared.cards,
        "more_cards": active - len(shown),
        "mine": mine,
        "own": own_count,
        "everyone": seen.active,
        "queue": seen.queue.entries,
        "more_queue": seen.queue.more,
        "events": shared.events,
        "failed": failed,
        "ended": (shared.ended if not mine else [] if own else _ended(user, owner="me")),
        "streams": [
            {"key": key, "title": _(title), "on": key == stream}
            for key, (title, _types) in STREAMS.items()
        ],
        "days": (days := used.days(seen.devices)),
        "days_sentence": week.summarize(days),
        "device_time": device_time.bar(used.device_time),
        "may_submit": has_role(user, Role.SUBMITTER),
        "may_join": has_role(user, Role.OPERATOR),
        "epoch": epoch,
        "seq": seq,
    }


@dataclass(frozen=True)
class Shared:
    """What users with the same rights see; `events` of one stream."""

    seen: scheduling.Overview
    cards: list[dict[str, Any]]
    events: list[event_messages.EventMessage]
    failed: FailedRuns
    ended: list[Any]  # the newest ended runs; empty while runs are active


_shared: SharedByKey[Hashable, Shared] = SharedByKey()


def shared_parts(user: Any, stream: str) -> Shared:
    """What users who see the runs of the same owners share; read again if rights just changed."""
    rights = people.visible_owners(user)

    def read() -> Shared:
        seen = scheduling.overview(user=user, runs_shown=CARDS, waiting_shown=WAITING)
        ended = [] if seen.running else _ended(user)
        failed = failed_runs(user, mine=False)
        result = Shared(seen, cards(seen.running), list_events(user, stream), failed, ended)
        if people.visible_owners(user) != rights:
            raise _RightsChanged
        return result

    try:
        key = (None if rights is None else tuple(rights), stream, get_language())
        return _shared.get(key, read)
    except _RightsChanged:
        return shared_parts(user, stream)


def _ended(user: Any, **filters: Any) -> list[Any]:
    return runs.run_list(user=user, state=run_headlines.ENDED, limit=RECENT, **filters)


class _RightsChanged(Exception):
    """A user's rights changed while the parts were read, so they fit no key."""


def cards(shown: list[Any]) -> list[dict[str, Any]]:
    """Return cards of active runs with loss curve, progress and ETA."""
    curves = telemetry.sparkline(
        run_ids=[run.pk for run in shown if run.kind not in ANSWERING], name="loss"
    )
    for name in ("inference/tokens_per_s", "inference/scores_per_s"):
        # a reward model's runs have the second alone
        if answering := [run.pk for run in shown if run.kind in ANSWERING and name in run.summary]:
            curves |= telemetry.sparkline(run_ids=answering, name=name)
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


def _serving(summary: dict[str, Any]) -> dict[str, Any]:
    values = {
        name: summary.get(f"inference/{name}")
        for name in (
            "ttft_s",
            "tpot_s",
            "tokens_per_s",
            "running",
            "score_s",
            "scores_per_s",
        )
    }
    return {
        "first": formatting.seconds(values["ttft_s"]),
        "per_token": formatting.seconds(values["tpot_s"]),
        "speed": formatting.quantity(values["tokens_per_s"]),
        "scores": values["score_s"] is not None,
        "score": formatting.seconds(values["score_s"]),
        "score_speed": formatting.quantity(values["scores_per_s"]),
        "running": formatting.quantity(values["running"]),
    }


def list_events(user: Any, stream: str) -> list[event_messages.EventMessage]:
    """Return the newest events of a stream, newest first."""
    types = STREAMS.get(stream, STREAMS[""])[1]
    rows = runs.events_visible_to(
        user=user,
        types=types,
        limit=EVENTS,
        without=event_messages.NOT_LISTED,
        or_failed=stream == "troubles",
    )
    shown = [event for event in rows if stream or not _minor(event)]
    return [event_messages.event_message(event, event.run.name) for event in shown]


_MINOR = frozenset(
    {
        "plan_resolved",
        "peak_measured",
        "recompute_chosen",
        "weights_loaded",
        "frozen_weights_loaded",
        "value_weights_loaded",
    }
)


def _minor(event: Any) -> bool:
    """Whether only the run page lists the event: attempts' states, plans, measured peaks."""
    return bool(
        event.type in _MINOR
        or (event.type == "state_changed" and event.data.get("of") == "attempt")
    )


class Usage(NamedTuple):
    """The last seven days: device-hours, MFU and device time of a fleet with this many devices."""

    days: Callable[[int], list[week.Day]]
    device_time: Any


def usage() -> Usage:
    """Read the usage of the last seven days."""
    now = timezone.now()
    since = (now - timedelta(days=week.DAYS - 1)).replace(hour=0, minute=0, second=0, microsecond=0)
    held = [
        week.RunAllocation(start, end or now, _mfu(mfu), devices)
        for start, end, mfu, devices in scheduling.held_since(since=since)
    ]
    return Usage(
        functools.cache(lambda capacity: week.week(held, devices=capacity, now=now)),
        scheduling.device_time(since=now - timedelta(days=week.DAYS)),
    )


_usage = SharedPart(usage)


def _mfu(mfu: Any) -> float | None:
    return float(mfu) if isinstance(mfu, int | float) else None
