"""What fleet and node pages show: nodes with devices and runs, and probes."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from django.utils.html import format_html
from django.utils.safestring import SafeString, mark_safe
from django.utils.translation import gettext as _
from django.utils.translation import gettext_noop

from orchestrator.common.errors import missing_object
from orchestrator.fleet import cordons, probe_history, selectors
from orchestrator.runs import selectors as runs
from webui.views.access import PageRequest
from webui.views.fleet import fleet_texts

PROBES = 1000
_MEASURES = {
    "matmul": (gettext_noop("Matrix products"), "GFLOP/s"),
    "memory": (gettext_noop("Memory bandwidth"), "GB/s"),
    "all_reduce_node": (gettext_noop("All-reduce within the node"), "GB/s"),
    "all_reduce": (gettext_noop("All-reduce over the gang"), "GB/s"),
}
OTHERS = gettext_noop("another user's run")


def node_named(request: PageRequest, name: str) -> Any:
    """The visible node with this name. Raises 404."""
    row = selectors.nodes_visible_to(user=request.user).filter(name=name).first()
    if row is None:
        raise missing_object("node", name)
    return row


def holders(
    allocations: Iterable[tuple[int, Any, bool]],
) -> dict[int, dict[str, Any]]:
    """`{device: {id, name, owner, state, since}}` of those that are allocated now.

    Takes what `with_visibility` returns; hidden runs have no id.
    """
    return {
        device: _holder(allocation, visible)
        for device, allocation, visible in allocations
        if allocation.released is None
    }


def with_visibility(user: Any, allocations: Iterable[Any]) -> list[tuple[int, Any, bool]]:
    """`(device, allocation, whether the user may see its run)` of each allocation."""
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


def node_row(node: Any, holders: dict[int, dict[str, Any]]) -> dict[str, Any]:
    """A node with its devices, their samples, runs and cordons."""
    sample = node.sample or {}
    samples = {item.get("index"): item for item in sample.get("devices", [])}
    held = {cordon.device_id: cordon for cordon in cordons.open_of(node)}
    devices = []
    for device in sorted(node.devices.all(), key=lambda device: device.index):
        reading = samples.get(device.index) or {}
        devices.append(
            {
                "device": device,
                "sample": reading,
                "run": holders.get(device.pk),
                "cordon": held.get(device.pk),
                "slow": fleet_texts.slow_text(device.slow),
            }
        )
    inventory = node.inventory or {}
    return {
        "node": node,
        "cordon": held.get(None),
        "devices": devices,
        "slots": _slots(devices),
        "held": sum(bool(item["run"]) for item in devices),
        "cores": inventory.get("cores"),
        "memory": inventory.get("memory_bytes"),
        "versions": inventory.get("versions") or {},
        "compatibility": selectors.compatibility(node),
        "supervisors": selectors.old_supervisors(node),
        "dropped_orders": selectors.dropped_orders(node),
        "isolation": fleet_texts.isolation_text(inventory.get("isolation")),
        "broker_user": fleet_texts.broker_user_text(inventory.get("broker_user")),
        "kinds": sorted(
            {device["device"].catalogue or device["device"].name for device in devices}
        ),
        "use": _mean([item["sample"].get("utilization") for item in devices]),
    }


def _slots(devices: Iterable[dict[str, Any]]) -> SafeString:
    """A square per device with its run or state; without templates, as a page shows hundreds."""
    named = _("device %(index)s: run %(run_id)s %(run_name)s, %(owner)s")
    plain = _("device %(index)s: %(state)s")
    squares = []
    for item in devices:
        index, run = item["device"].index, item["run"]
        if run is None:
            bad = not item["device"].healthy or item["cordon"]
            cordoned = _("cordoned") if item["cordon"] else _("free")
            state = cordoned if item["device"].healthy else _("unhealthy")
            mark = " unhealthy" if bad else ""
            title = plain % {"index": index, "state": state}
            squares.append(format_html('<span class="slot{}" title="{}"></span>', mark, title))
        elif run["id"]:
            names = {"run_id": run["id"], "run_name": run["name"], "owner": run["owner"]}
            title = named % {"index": index, **names}
            squares.append(
                format_html(
                    '<a class="slot held state-{}" href="/runs/{}/" title="{}">'
                    '<span class="visually-hidden">{}</span></a>',
                    run["state"],
                    run["id"],
                    title,
                    title,
                )
            )
        else:
            title = plain % {"index": index, "state": run["name"]}
            squares.append(format_html('<span class="slot held" title="{}"></span>', title))
    return mark_safe("".join(squares))


def _mean(values: list[Any]) -> float | None:
    known = [value for value in values if isinstance(value, int | float)]
    return sum(known) / len(known) if known else None


def probe_rows(node: Any) -> list[dict[str, Any]]:
    """The newest rates of preflight probes by measure, for the node's page."""
    rows = []
    for series in probe_history.series_of(probe_history.probes_of(node=node)[:PROBES]):
        name, unit = _MEASURES[series.measure]
        newest, typical = series.values[-1], series.typical
        rows.append(
            {
                "name": _(name),
                "device": series.device,
                "ranks": series.ranks,
                "newest": f"{newest / 1e9:,.3g} {unit}",
                "typical": f"{typical / 1e9:,.3g} {unit}",
                "share": newest / typical,
                "ok": series.ok[-1],
                "time": series.times[-1],
                "count": len(series.values),
                "curve": ",".join(f"{value / 1e9:.4g}" for value in series.values),
            }
        )
    return rows
