"""Fleet and node: what is there, is it well, who holds what and held it when; drain, take back, let
join.
"""

from __future__ import annotations

from collections.abc import Iterable
from datetime import timedelta
from typing import Any

from django.conf import settings
from django.http import HttpResponse
from django.shortcuts import render
from django.utils import timezone
from django.views.decorators.cache import never_cache
from django.views.decorators.http import require_GET, require_http_methods, require_POST

from orchestrator.accounts.roles import Role
from orchestrator.common import live
from orchestrator.common.errors import not_found
from orchestrator.fleet import selectors, services
from orchestrator.runs import selectors as runs
from orchestrator.scheduling import selectors as scheduling
from webui.charts.gantt import WINDOWS, Held, gantt
from webui.presentation import formatting
from webui.views.access import PageRequest, demand, done, may, page

OTHERS = "a run of others"


@page
@require_GET
def fleet(request: PageRequest) -> HttpResponse:
    epoch, seq = live.heads(["fleet"]).get("fleet", ("", 0))
    nodes = list(selectors.nodes_visible_to(user=request.user))
    holders = _holders(request.user)
    shown = [_node(node, holders) for node in nodes]
    chart, window = _gantt(request, [device for node in nodes for device in node.devices.all()])
    context = {
        "nodes": shown,
        "sentence": sentence(shown),
        "operator": may(request.user, Role.OPERATOR),
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
    epoch, seq = live.heads(["fleet"]).get("fleet", ("", 0))
    found = _named(request, name)
    shown = _node(found, _holders(request.user))
    chart, window = _gantt(request, list(found.devices.all()))
    context = {
        "node": shown,
        "sentence": node_sentence(shown),
        "operator": may(request.user, Role.OPERATOR),
        "chart": chart,
        "window": window,
        "windows": list(WINDOWS),
        "head": {"epoch": epoch, "seq": seq},
    }
    return render(request, "webui/node_parts.html" if request.htmx else "webui/node.html", context)


@page
@require_http_methods(["GET", "POST"])
def drain(request: PageRequest, name: str) -> HttpResponse:
    """GET tells what draining would do to whom; POST does it."""
    demand(request.user, Role.OPERATOR, "Draining nodes")
    found = _named(request, name)
    if request.method == "POST":
        services.node_drain(node=found, by=request.user, reason=request.POST.get("reason", ""))
        return done(
            request, f"{found.name} is drained: nothing new starts there.", "node", found.name
        )
    shown = _node(found, _holders(request.user))
    nodes = list(selectors.nodes_visible_to(user=request.user))
    rest = [
        other
        for other in nodes
        if other.pk != found.pk and other.health == "up" and not other.drained
    ]
    queue = scheduling.queue_visible_to(user=request.user)
    left = [
        device for other in rest if other.pool_id == found.pool_id for device in other.devices.all()
    ]
    context = {
        "node": shown,
        "attempts": runs.attempts_on(node=found.name),
        "left": sum(device.healthy for device in left),
        "waiting": [entry for entry in queue if entry.run.pool_name == found.pool.name],
    }
    return render(request, "webui/drain.html", context)


@page
@require_POST
def undrain(request: PageRequest, name: str) -> HttpResponse:
    found = _named(request, name)
    services.node_undrain(node=found, by=request.user)
    return done(request, f"{found.name} takes work again.", "node", found.name)


@page
@never_cache
@require_http_methods(["GET", "POST"])
def join(request: PageRequest) -> HttpResponse:
    """A token that lets one machine join, once; its text stands in the answer to the POST and
    nowhere else.
    """
    demand(request.user, Role.OPERATOR, "Letting nodes join")
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
    """How many devices work for whom, and what is wrong with which node."""
    if not nodes:
        return "No node has joined yet, so no run can start."
    devices = [device for node in nodes for device in node["devices"]]
    held = sum(bool(device["run"]) for device in devices)
    there = f"{formatting.count(len(nodes), 'node')}, {formatting.count(len(devices), 'device')}"
    text = f"{there}: {held} held, {len(devices) - held} free"
    troubles = [
        f"{node['node'].name} is {node['node'].health}"
        for node in nodes
        if node["node"].health != "up"
    ]
    troubles += [f"{node['node'].name} is drained" for node in nodes if node["node"].drained]
    sick = sum(not device["device"].healthy for device in devices)
    if sick:
        troubles.append(f"{formatting.count(sick, 'device')} not healthy")
    return f"{text}; {formatting.listed(troubles) if troubles else 'all nodes are up'}."


def node_sentence(shown: dict[str, Any]) -> str:
    node, devices = shown["node"], shown["devices"]
    health = {
        "up": "is up",
        "silent": "has not been heard of lately; what runs there may well be running",
        "lost": "is lost: its runs were given back to the queue",
    }[node.health]
    held = sum(bool(device["run"]) for device in devices)
    text = f"It {health}; {held} of {formatting.count(len(devices), 'device')} held"
    if node.drained:
        text += (
            "; drained"
            + (f" ({node.drain_reason})" if node.drain_reason else "")
            + ", nothing new starts here"
        )
    return text + "."


def _named(request: PageRequest, name: str) -> Any:
    found = selectors.nodes_visible_to(user=request.user).filter(name=name).first()
    if found is None:
        raise not_found("node", name)
    return found


def _holders(user: Any) -> dict[int, dict[str, Any]]:
    """`{device: {id, name, owner, state, since}}` of what is held now; what the person may not see
    has no id.
    """
    held = _seen(user, scheduling.allocations_by_device().values())
    return {device: _told(one, visible) for device, one, visible in held}


def _seen(user: Any, allocations: Iterable[Any]) -> list[tuple[int, Any, bool]]:
    rows = list(allocations)
    ids = {one.attempt.run_id for one in rows}
    visible = (
        set(runs.runs_visible_to(user=user).filter(pk__in=ids).values_list("pk", flat=True))
        if ids
        else set()
    )
    return [(one.device_id, one, one.attempt.run_id in visible) for one in rows]


def _told(allocation: Any, visible: bool) -> dict[str, Any]:
    run = allocation.attempt.run
    if not visible:
        return {
            "id": None,
            "name": OTHERS,
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
    for device in sorted(node.devices.all(), key=lambda one: one.index):
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
    """The chart of the window that the address asks for, a row a device."""
    window = request.GET.get("window", "")
    window = window if window in WINDOWS else "6h"
    until = timezone.now()
    since: Any = until - WINDOWS[window]
    wanted = {device.pk for device in devices}
    held = []
    for device, one, visible in _seen(request.user, scheduling.allocations(since=since)):
        if device in wanted:
            run = one.attempt.run
            id, name = (run.pk, run.name) if visible else (0, OTHERS)
            held.append(Held(device, id, name, run.state, one.created, one.released))
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
