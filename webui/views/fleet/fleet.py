"""Fleet and node pages: inventory, health, allocations over time."""

from __future__ import annotations

from django.http import HttpResponse
from django.shortcuts import render
from django.views.decorators.http import require_GET

from orchestrator.accounts.roles import Role
from orchestrator.common import live
from orchestrator.dead_letters import selectors as dead_letters
from orchestrator.fleet import cordons, selectors, suspect_links
from orchestrator.runs.store import access, copies
from webui.charts.gantt import WINDOWS
from webui.views.access import PageRequest, has_role, page
from webui.views.fleet import node_history
from webui.views.fleet.allocation_chart import allocation_chart, allocations_in
from webui.views.fleet.fleet_list import NodeFilters, select
from webui.views.fleet.fleet_rows import holders, node_named, node_row, probe_rows
from webui.views.fleet.fleet_state import fleet_state
from webui.views.fleet.fleet_texts import node_sentence, sentence
from webui.views.fleet.node_probe_rows import node_probe_card

CORDONS = 20  # newest ones shown


@page
@require_GET
def fleet(request: PageRequest) -> HttpResponse:
    """Show the fleet, or its live part for an htmx request."""
    epoch, seq = live.heads(["fleet"]).get("fleet", ("", 0))
    state = fleet_state.get()
    window = chosen_window(request)
    listed = select(state.nodes, NodeFilters.read(request.GET), state.by_node, window)
    visible = selectors.nodes_visible_to(user=request.user)
    nodes = list(visible.filter(pk__in=[node.id for node in listed.nodes]))
    devices = [device for node in nodes for device in node.devices.all()]
    allocations = allocations_in(request.user, devices, window)
    held = holders(allocations)
    shown = [node_row(node, held) for node in nodes]
    chart = allocation_chart(allocations, devices, window)
    context = {
        "nodes": shown,
        "list": listed,
        "any_nodes": bool(state.nodes),
        "sentence": sentence(state.nodes, held=state.held),
        "operator": has_role(request.user, Role.OPERATOR),
        "dead_letters": sum(dead_letters.open_counts().values()),
        "pools": state.pools,
        "chart": chart,
        "window": window,
        "windows": window_links(listed.filters),
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
    row = node_named(request, name)
    devices = list(row.devices.all())
    shown = node_row(row, holders(allocations_in(request.user, devices, "1h")))
    context = {
        "node": shown,
        "sentence": node_sentence(shown),
        "probes": probe_rows(row),
        "probe": node_probe_card(row),
        "problem": copies.problem_of([row.name]) if access.configured() else None,
        "suspect": suspect_links.suspicions().get(row.name),
        "history": list(cordons.cordons_of(node=row)[:CORDONS]),
        "operator": has_role(request.user, Role.OPERATOR),
        "head": {"epoch": epoch, "seq": seq},
    }
    if request.htmx:
        return render(request, "webui/node_parts.html", context)
    context["history_part"] = node_history.context(request, row)
    return render(request, "webui/node.html", context)


def chosen_window(request: PageRequest) -> str:
    """The time window of the allocation chart that the URL names."""
    window = request.GET.get("window", "")
    return window if window in WINDOWS else "6h"


def window_links(filters: NodeFilters) -> dict[str, str]:
    """`{window: URL}` that keeps the filters."""
    return {name: filters.url(window=name, page=filters.page) for name in WINDOWS}
