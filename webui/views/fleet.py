"""Fleet and node pages: inventory, health, allocations over time; drain, undrain and add nodes."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import timedelta
from typing import Any

from django.conf import settings
from django.http import HttpResponse
from django.shortcuts import render
from django.utils import timezone
from django.utils.translation import gettext as _
from django.utils.translation import gettext_noop, ngettext
from django.views.decorators.cache import never_cache
from django.views.decorators.http import require_GET, require_http_methods, require_POST

from orchestrator.accounts.roles import Role
from orchestrator.common import live
from orchestrator.common.errors import missing_object
from orchestrator.fleet import selectors, services
from orchestrator.runs import selectors as runs
from orchestrator.scheduling import selectors as scheduling
from webui.charts.gantt import WINDOWS, Held, gantt
from webui.presentation import formatting
from webui.views.access import PageRequest, has_role, page, redirect_with_message, require_role

OTHERS = gettext_noop("another user's run")


@page
@require_GET
def fleet(request: PageRequest) -> HttpResponse:
    """Show the fleet, or its live part for an htmx request."""
    epoch, seq = live.heads(["fleet"]).get("fleet", ("", 0))
    nodes = list(selectors.nodes_visible_to(user=request.user))
    holders = _holders(request.user)
    shown = [_node(node, holders) for node in nodes]
    chart, window = _gantt(request, [device for node in nodes for device in node.devices.all()])
    context = {
        "nodes": shown,
        "sentence": sentence(shown),
        "operator": has_role(request.user, Role.OPERATOR),
        "pools": selectors.pools(),
        "chart": chart,
        "window": window,
        "windows": list(WINDOWS),
        "head": {"epoch": epoch, "seq": seq},
    }
    return render(
        request, "webui/fleet_parts.html" if request.htmx else "webui/fleet.html", context
    )


@page
@require_GET
def node(request: PageRequest, name: str) -> HttpResponse:
    """Show a node, or its live part for an htmx request."""
    epoch, seq = live.heads(["fleet"]).get("fleet", ("", 0))
    row = _node_named(request, name)
    shown = _node(row, _holders(request.user))
    chart, window = _gantt(request, list(row.devices.all()))
    context = {
        "node": shown,
        "sentence": node_sentence(shown),
        "operator": has_role(request.user, Role.OPERATOR),
        "chart": chart,
        "window": window,
        "windows": list(WINDOWS),
        "head": {"epoch": epoch, "seq": seq},
    }
    return render(request, "webui/node_parts.html" if request.htmx else "webui/node.html", context)


@page
@require_http_methods(["GET", "POST"])
def drain(request: PageRequest, name: str) -> HttpResponse:
    """GET shows the consequences of draining a node; POST drains it."""
    require_role(request.user, Role.OPERATOR, _("Draining nodes"))
    row = _node_named(request, name)
    if request.method == "POST":
        services.node_drain(node=row, by=request.user, reason=request.POST.get("reason", ""))
        return redirect_with_message(
            request,
            _("%(node)s is drained: no new runs start there.") % {"node": row.name},
            "node",
            row.name,
        )
    shown = _node(row, _holders(request.user))
    nodes = list(selectors.nodes_visible_to(user=request.user))
    rest = [
        other
        for other in nodes
        if other.pk != row.pk and other.health == "up" and not other.drained
    ]
    queue = scheduling.queue_visible_to(user=request.user)
    left = [
        device for other in rest if other.pool_id == row.pool_id for device in other.devices.all()
    ]
    context = {
        "node": shown,
        "attempts": runs.attempts_on(node=row.name),
        "left": sum(device.healthy for device in left),
        "waiting": [entry for entry in queue if entry.run.pool_name == row.pool.name],
    }
    return render(request, "webui/drain.html", context)


@page
@require_POST
def undrain(request: PageRequest, name: str) -> HttpResponse:
    """Take a drained node back into service."""
    row = _node_named(request, name)
    services.node_undrain(node=row, by=request.user)
    return redirect_with_message(
        request, _("%(node)s is in service again.") % {"node": row.name}, "node", row.name
    )


@page
@never_cache
@require_http_methods(["GET", "POST"])
def join(request: PageRequest) -> HttpResponse:
    """Create a single-use join token; its text is only in the response to that POST."""
    require_role(request.user, Role.OPERATOR, _("Adding nodes"))
    context: dict[str, Any] = {"pools": selectors.pools()}
    if request.method == "POST":
        pool = request.POST.get("pool", "").strip() or None
        token = services.join_token_create(by=request.user, pool=pool)
        url = settings.REDIS_URL
        local = url.startswith("unix:") or "127.0.0.1" in url or "localhost" in url
        command = f"python -m workers.agent --redis {url} --join {token}"
        context |= {"token": token, "command": command, "local": local, "pool": pool or "default"}
    return render(request, "webui/join.html", context)


def sentence(nodes: list[dict[str, Any]]) -> str:
    """Summarize devices in use and problems of nodes."""
    if not nodes:
        return _("No node has joined yet, so no run can start.")
    devices = [device for node in nodes for device in node["devices"]]
    held = sum(bool(device["run"]) for device in devices)
    text = ngettext("%(count)s node", "%(count)s nodes", len(nodes)) % {"count": f"{len(nodes):,}"}
    text += ngettext(", %(count)s device", ", %(count)s devices", len(devices)) % {
        "count": f"{len(devices):,}"
    }
    text += _(": %(held)s allocated, %(free)s free") % {
        "held": f"{held:,}",
        "free": f"{len(devices) - held:,}",
    }
    troubles = [
        _("%(node)s is %(health)s") % {"node": node["node"].name, "health": _(node["node"].health)}
        for node in nodes
        if node["node"].health != "up"
    ]
    troubles += [
        _("%(node)s is drained") % {"node": node["node"].name}
        for node in nodes
        if node["node"].drained
    ]
    unhealthy = sum(not device["device"].healthy for device in devices)
    if unhealthy:
        troubles.append(
            ngettext("%(count)s unhealthy device", "%(count)s unhealthy devices", unhealthy)
            % {"count": unhealthy}
        )
    return f"{text}; {formatting.listed(troubles) if troubles else _('all nodes are up')}."


def node_sentence(shown: dict[str, Any]) -> str:
    """Summarize a node's health and use."""
    node, devices = shown["node"], shown["devices"]
    text = {
        "up": _("The node is up"),
        "silent": _("The node is silent: no recent heartbeat; its runs may still be running"),
        "lost": _("The node is lost: its runs were requeued"),
    }[node.health]
    held = sum(bool(device["run"]) for device in devices)
    text += ngettext(
        "; %(held)s of %(count)s device allocated",
        "; %(held)s of %(count)s devices allocated",
        len(devices),
    ) % {"held": held, "count": len(devices)}
    if node.drained:
        reason = f" ({node.drain_reason})" if node.drain_reason else ""
        text += _("; drained%(reason)s, no new runs start here") % {"reason": reason}
    return text + "."


def _node_named(request: PageRequest, name: str) -> Any:
    row = selectors.nodes_visible_to(user=request.user).filter(name=name).first()
    if row is None:
        raise missing_object("node", name)
    return row


def _holders(user: Any) -> dict[int, dict[str, Any]]:
    """`{device: {id, name, owner, state, since}}` of allocated devices; hidden runs have no id."""
    rows = _with_visibility(user, scheduling.allocations_by_device().values())
    return {device: _holder(allocation, visible) for device, allocation, visible in rows}


def _with_visibility(user: Any, allocations: Iterable[Any]) -> list[tuple[int, Any, bool]]:
    rows = list(allocations)
    ids = {row.attempt.run_id for row in rows}
    visible = (
        set(runs.runs_visible_to(user=user).filter(pk__in=ids).values_list("pk", flat=True))
        if ids
        else set()
    )
    return [(row.device_id, row, row.attempt.run_id in visible) for row in rows]


def _holder(allocation: Any, visible: bool) -> dict[str, Any]:
    run = allocation.attempt.run
    if not visible:
        return {
            "id": None,
            "name": _(OTHERS),
            "owner": "",
            "state": run.state,
            "since": allocation.created,
        }
    return {
        "id": run.pk,
        "name": run.name,
        "owner": run.owner.username,
        "state": run.state,
        "since": allocation.created,
        "rank": allocation.rank,
    }


def _node(node: Any, holders: dict[int, dict[str, Any]]) -> dict[str, Any]:
    sample = node.sample or {}
    samples = {item.get("index"): item for item in sample.get("devices", [])}
    devices = []
    for device in sorted(node.devices.all(), key=lambda device: device.index):
        reading = samples.get(device.index) or {}
        devices.append({"device": device, "sample": reading, "run": holders.get(device.pk)})
    inventory = node.inventory or {}
    return {
        "node": node,
        "devices": devices,
        "held": sum(bool(item["run"]) for item in devices),
        "cores": inventory.get("cores"),
        "memory": inventory.get("memory_bytes"),
        "versions": inventory.get("versions") or {},
        "kinds": sorted(
            {device["device"].catalogue or device["device"].name for device in devices}
        ),
        "use": _mean([item["sample"].get("utilization") for item in devices]),
    }


def _mean(values: list[Any]) -> float | None:
    known = [value for value in values if isinstance(value, int | float)]
    return sum(known) / len(known) if known else None


def _gantt(request: PageRequest, devices: list[Any]) -> tuple[dict[str, Any], str]:
    """The allocation chart of the requested window, one row per device."""
    window = request.GET.get("window", "")
    window = window if window in WINDOWS else "6h"
    until = timezone.now()
    since: Any = until - WINDOWS[window]
    shown = {device.pk for device in devices}
    held = []
    for device, allocation, visible in _with_visibility(
        request.user, scheduling.allocations(since=since)
    ):
        if device in shown:
            run = allocation.attempt.run
            id, name = (run.pk, run.name) if visible else (0, _(OTHERS))
            held.append(Held(device, id, name, run.state, allocation.created, allocation.released))
    drawn = gantt(held, [device.pk for device in devices], since=since, until=until)
    rows = [{"device": device, "bars": drawn.bars[device.pk]} for device in devices]
    table = [{"device": row["device"], "bar": bar} for row in rows for bar in row["bars"]]
    span = formatting.duration((until - since) / timedelta(seconds=1))
    return {
        "rows": rows,
        "ticks": drawn.ticks,
        "share": drawn.share,
        "table": table,
        "span": span,
    }, window
