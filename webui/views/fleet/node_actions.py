"""Actions on nodes: drain, cordon, confirm as lost, remove, and join tokens."""

from __future__ import annotations

from typing import Any

from django.conf import settings
from django.http import HttpResponse
from django.shortcuts import render
from django.utils.translation import gettext as _
from django.views.decorators.cache import never_cache
from django.views.decorators.http import require_http_methods, require_POST

from orchestrator.accounts.roles import Role
from orchestrator.common.errors import invalid
from orchestrator.fleet import broker_users, cordoning, node_health, selectors, services
from orchestrator.runs import selectors as runs
from orchestrator.scheduling import selectors as scheduling
from orchestrator.scheduling import services as scheduling_services
from webui.views.access import PageRequest, page, redirect_with_message, require_role
from webui.views.fleet.fleet_rows import holders, node_named, node_row, with_visibility


@page
@require_http_methods(["GET", "POST"])
def drain(request: PageRequest, name: str) -> HttpResponse:
    """GET shows the consequences of draining a node; POST drains it."""
    require_role(request.user, Role.OPERATOR, _("Draining nodes"))
    row = node_named(request, name)
    if request.method == "POST":
        services.node_drain(node=row, by=request.user, reason=request.POST.get("reason", ""))
        return redirect_with_message(
            request,
            _("%(node)s is drained: no new runs start there.") % {"node": row.name},
            "node",
            row.name,
        )
    ids = [device.pk for device in row.devices.all()]
    held = scheduling.allocations_by_device(ids).values()
    shown = node_row(row, holders(with_visibility(request.user, held)))
    others = [
        node
        for node in selectors.node_facts(user=request.user)
        if node.id != row.pk and node.health == "up" and not node.drained
    ]
    context = {
        "node": shown,
        "attempts": runs.attempts_on(node=row.name),
        "left": sum(node.devices - node.unusable for node in others if node.pool == row.pool.name),
        "waiting": scheduling.waiting_count(user=request.user, pool=row.pool.name),
    }
    return render(request, "webui/drain.html", context)


@page
@require_POST
def topology(request: PageRequest, name: str) -> HttpResponse:
    """Set the node's path in the tree of switches."""
    row = services.node_topology_set(
        node=node_named(request, name), by=request.user, path=request.POST.get("path", "")
    )
    text = _("Saved the network location of %(node)s.") % {"node": row.name}
    return redirect_with_message(request, text, "node", row.name)


@page
@require_POST
def undrain(request: PageRequest, name: str) -> HttpResponse:
    """Take a drained node back into service."""
    row = node_named(request, name)
    services.node_undrain(node=row, by=request.user)
    return redirect_with_message(
        request, _("%(node)s is in service again.") % {"node": row.name}, "node", row.name
    )


@page
@require_POST
def cordon(request: PageRequest, name: str) -> HttpResponse:
    """Exclude a node, or one of its devices, from placement."""
    row, device = node_named(request, name), _device_index(request)
    cordoning.node_cordon(
        node=row, by=request.user, device=device, reason=request.POST.get("reason", "")[:300]
    )
    text = _("%(target)s is cordoned: no new runs start there.")
    return redirect_with_message(request, text % {"target": _target(row, device)}, "node", name)


@page
@require_POST
def uncordon(request: PageRequest, name: str) -> HttpResponse:
    """Lift the cordon of a node or of one of its devices."""
    row, device = node_named(request, name), _device_index(request)
    cordoning.node_uncordon(node=row, by=request.user, device=device)
    text = _("The cordon of %(target)s is lifted.")
    return redirect_with_message(request, text % {"target": _target(row, device)}, "node", name)


def _device_index(request: PageRequest) -> int | None:
    text = request.POST.get("device", "")
    if text and not (text.isascii() and text.isdigit() and len(text) < 6):
        problem = _("%(text)s is not a device's index") % {"text": repr(text[:20])}
        raise invalid("device", problem, _("Use a number such as 0."))
    return int(text) if text else None


def _target(node: Any, device: int | None) -> str:
    if device is None:
        return str(node.name)
    return _("Device %(device)s of %(node)s") % {"device": device, "node": node.name}


@page
@require_POST
def probe(request: PageRequest, name: str) -> HttpResponse:
    """Ask an idle node to measure its devices for the planner."""
    row = node_named(request, name)
    scheduling_services.node_probe(node=row, by=request.user)
    text = _("%(node)s measures its devices for about a minute.") % {"node": row.name}
    return redirect_with_message(request, text, "node", row.name)


@page
@require_POST
def confirm_lost(request: PageRequest, name: str) -> HttpResponse:
    """Confirm that an overdue node is lost."""
    row = node_named(request, name)
    node_health.node_confirm_lost(node=row, by=request.user)
    return redirect_with_message(
        request,
        _("Marked %(node)s as lost. Its runs will be requeued.") % {"node": row.name},
        "node",
        row.name,
    )


@page
@require_http_methods(["GET", "POST"])
def remove(request: PageRequest, name: str) -> HttpResponse:
    """GET shows the consequences of removing a node; POST removes it."""
    require_role(request.user, Role.OPERATOR, _("Removing nodes"))
    row = node_named(request, name)
    if request.method == "POST":
        scheduling_services.node_remove(node=row, by=request.user)
        return redirect_with_message(request, _("%(node)s is removed.") % {"node": name}, "fleet")
    attempts = runs.attempts_on(node=row.name)
    return render(request, "webui/node_remove.html", {"node": row, "attempts": attempts})


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
        limited = broker_users.limited_join_url()
        url = limited or str(settings.REDIS_URL)
        local = url.startswith("unix:") or "127.0.0.1" in url or "localhost" in url
        command = f"python -m workers.agent --redis {url} --join {token}"
        context |= {"token": token, "command": command, "local": local, "pool": pool or "default"}
        context["limited"] = limited is not None
    return render(request, "webui/join.html", context)
