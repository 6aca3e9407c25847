"""Bytes that a device sends per step: by parallelism, by collective, and ring vs parameter server.

Conventions for the volumes: `orchestrator/planner/README.md`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from django.utils.translation import gettext as _
from django.utils.translation import gettext_noop

from webui.presentation import formatting

KINDS: Final = (
    ("dp_bytes", gettext_noop("data parallel"), gettext_noop("gradients and sharded weights")),
    ("tp_bytes", gettext_noop("tensor parallel"), gettext_noop("activations of each layer")),
    ("pp_bytes", gettext_noop("pipeline parallel"), gettext_noop("activations between stages")),
    ("cp_bytes", gettext_noop("context parallel"), gettext_noop("keys and values around the ring")),
    ("ep_bytes", gettext_noop("expert parallel"), gettext_noop("tokens to their experts and back")),
)
CALLS: Final = (
    (
        "all_reduce_bytes",
        gettext_noop("all-reduce"),
        gettext_noop("buffer size: gradients of replicas, activations of tensor ranks"),
    ),
    (
        "all_gather_bytes",
        gettext_noop("all-gather"),
        gettext_noop("output size: sharded weights, sequences of tensor ranks"),
    ),
    (
        "reduce_scatter_bytes",
        gettext_noop("reduce-scatter"),
        gettext_noop("input size: sharded gradients, activations of tensor ranks"),
    ),
    (
        "broadcast_bytes",
        gettext_noop("broadcast"),
        gettext_noop("tensor size: weights updated by ZeRO 1"),
    ),
    (
        "all_to_all_bytes",
        gettext_noop("all-to-all"),
        gettext_noop("tokens to their experts and back"),
    ),
    (
        "send_bytes",
        gettext_noop("send"),
        gettext_noop("activations and their gradients between stages"),
    ),
)


@dataclass(frozen=True, slots=True)
class TrafficBar:
    """One bar: a kind of traffic; `share` in percent of the largest."""

    name: str
    label: str
    description: str
    bytes: float
    size: str
    share: float


def kinds(comm: Mapping[str, Any]) -> list[TrafficBar]:
    """Returns all kinds of parallelism, including those without traffic."""
    return _kinds(KINDS, comm)


def calls(collectives: Mapping[str, Any] | None) -> list[TrafficBar]:
    """Returns the bytes per collective; empty if they are not counted or all are zero."""
    rows = _kinds(CALLS, collectives or {})
    return rows if any(kind.bytes for kind in rows) else []


def _kinds(known: tuple[tuple[str, str, str], ...], values: Mapping[str, Any]) -> list[TrafficBar]:
    sizes = {name: formatting.number(values.get(name)) or 0.0 for name, label, about in known}
    most = max(sizes.values()) or 1.0
    return [
        TrafficBar(
            name,
            _(label),
            _(description),
            sizes[name],
            _size(sizes[name]),
            round(100 * sizes[name] / most, 2),
        )
        for name, label, description in known
    ]


def summary(comm: Mapping[str, Any]) -> str:
    """Returns the traffic by parallelism as one sentence."""
    used = sorted((kind for kind in kinds(comm) if kind.bytes), key=lambda kind: -kind.bytes)
    if not used:
        return _("Devices do not communicate.")
    total = _size(sum(kind.bytes for kind in used))
    return _("%(total)s per device and step: %(parts)s.") % {
        "total": total,
        "parts": formatting.listed([f"{kind.label} {kind.size}" for kind in used]),
    }


def servers(each: float, link: float, dp: int) -> list[TrafficBar]:
    """Compares a ring all-reduce of the gradients with a parameter server; empty for dp = 1.

    `each`: bytes per device and step in both cases; `link`: bytes over the server's link.
    """
    if dp < 2 or not each:
        return []
    rows = (
        (
            "parameter_server_bytes",
            _("ring, per device"),
            _("twice the gradients, independent of the number of devices"),
            each,
        ),
        (
            "parameter_server_bytes",
            _("server, per worker"),
            _("gradients to the server, parameters back"),
            each,
        ),
        (
            "parameter_server_link_bytes",
            _("server, its link"),
            _("the traffic of all %(count)s workers over one link") % {"count": dp},
            link,
        ),
    )
    return [
        TrafficBar(name, label, description, value, _size(value), round(100 * value / link, 2))
        for name, label, description, value in rows
    ]


def _size(value: float) -> str:
    return formatting.memory(value) if value else _("none")
