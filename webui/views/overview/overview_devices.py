"""The devices on the overview: a mark per device, or for a large fleet a cell per node."""

from __future__ import annotations

from typing import Any, Final

from django.utils import timezone
from django.utils.translation import gettext as _

from orchestrator.fleet import cordons
from orchestrator.fleet import selectors as fleet
from orchestrator.scheduling import selectors as scheduling
from webui.charts import devices, node_map
from webui.shared_parts import SharedPart
from webui.views.fleet.fleet_rows import with_visibility
from webui.views.fleet.fleet_state import fleet_state

MARKS: Final = 128  # devices; a mark takes 0.3 ms of CPU time, a cell of a node 10 µs


def device_context(user: Any) -> dict[str, Any]:
    """`grid` for a fleet of up to MARKS devices, else `node_map`."""
    if fleet.device_count() > MARKS:
        return {"node_map": _map.get(), "no_nodes": False}
    nodes = list(fleet.nodes_visible_to(user=user))
    return {"grid": grid(nodes, user), "no_nodes": not nodes}


def _read_map() -> node_map.NodeMap:
    state = fleet_state.get()
    return node_map.node_map(state.nodes, state.by_node, now=timezone.now().timestamp())


_map = SharedPart(_read_map)


def grid(nodes: list[Any], user: Any) -> list[dict[str, Any]]:
    """Return nodes with their devices' marks; runs that the user may not see are anonymous."""
    held = with_visibility(user, scheduling.allocations_by_device().values())
    runs = {device: _run(allocation, visible) for device, allocation, visible in held}
    return [
        {
            "name": node.name,
            "health": "drained" if node.drained and node.health == "up" else node.health,
            "marks": [
                _mark(node, device, runs.get(device.pk))
                for device in sorted(node.devices.all(), key=lambda device: device.index)
            ],
        }
        for node in nodes
    ]


def _run(allocation: Any, visible: bool) -> dict[str, Any]:
    holder = allocation.attempt.run
    summary = holder.summary
    last = scheduling.last_step(holder.kind, summary.get("time"), allocation.attempt.started)
    return {
        "id": holder.pk if visible else "",
        "name": holder.name if visible else _("of another team"),
        "state": holder.state,
        "owner": holder.owner.username,
        "mfu": summary.get("mfu"),
        "step_time_s": summary.get("step_time_s"),
        "age_s": timezone.now().timestamp() - last if last is not None else None,
    }


def _mark(node: Any, device: Any, run: dict[str, Any] | None) -> devices.DeviceMark:
    """The mark of a device; `node` is one of `nodes_visible_to`."""
    cordoned = any(cordon.device_id in (None, device.pk) for cordon in cordons.open_of(node))
    sample = next(
        (row for row in node.sample.get("devices", []) if row.get("index") == device.index), None
    )
    return devices.mark(
        node=node.name,
        health=node.health,
        drained=node.drained,
        index=device.index,
        healthy=device.healthy,
        memory_bytes=device.memory_bytes,
        sample=sample,
        run=run,
        cordoned=cordoned,
    )
