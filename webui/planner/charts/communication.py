"""Bytes that a device sends per step: by parallelism, by collective, and ring vs parameter server.

Conventions for the volumes: `orchestrator/planner/README.md`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from webui.presentation import formatting

KINDS: Final = (
    ("dp_bytes", "data", "gradients and sharded weights"),
    ("tp_bytes", "tensor", "activations of each layer"),
    ("pp_bytes", "pipeline", "activations between stages"),
    ("cp_bytes", "context", "keys and values around the ring"),
    ("ep_bytes", "expert", "tokens to their experts and back"),
)
CALLS: Final = (
    (
        "all_reduce_bytes",
        "all-reduce",
        "buffer size: gradients of replicas, activations of tensor ranks",
    ),
    ("all_gather_bytes", "all-gather", "output size: sharded weights, sequences of tensor ranks"),
    (
        "reduce_scatter_bytes",
        "reduce-scatter",
        "input size: sharded gradients, activations of tensor ranks",
    ),
    ("broadcast_bytes", "broadcast", "tensor size: weights updated by ZeRO 1"),
    ("all_to_all_bytes", "all-to-all", "tokens to their experts and back"),
    ("send_bytes", "send", "activations and their gradients between stages"),
)


@dataclass(frozen=True, slots=True)
class Kind:
    """One bar: a kind of traffic; `share` in percent of the largest."""

    name: str
    label: str
    description: str
    bytes: float
    size: str
    share: float


def kinds(comm: Mapping[str, Any]) -> list[Kind]:
    """Returns all kinds of parallelism, including those without traffic."""
    return _kinds(KINDS, comm)


def calls(collectives: Mapping[str, Any] | None) -> list[Kind]:
    """Returns the bytes per collective; empty if they are not counted or all are zero."""
    rows = _kinds(CALLS, collectives or {})
    return rows if any(kind.bytes for kind in rows) else []


def _kinds(known: tuple[tuple[str, str, str], ...], values: Mapping[str, Any]) -> list[Kind]:
    sizes = {name: formatting.number(values.get(name)) or 0.0 for name, _, _ in known}
    most = max(sizes.values()) or 1.0
    return [
        Kind(
            name,
            label,
            description,
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
        return "No communication between devices."
    total = _size(sum(kind.bytes for kind in used))
    return (
        f"{total} per device and step: "
        f"{formatting.listed([f'{kind.label} parallel {kind.size}' for kind in used])}."
    )


def servers(each: float, link: float, dp: int) -> list[Kind]:
    """Compares a ring all-reduce of the gradients with a parameter server; empty for dp = 1.

    `each`: bytes per device and step in both cases; `link`: bytes over the server's link.
    """
    if dp < 2 or not each:
        return []
    rows = (
        (
            "parameter_server_bytes",
            "ring, every device",
            "twice the gradients, whatever the number of devices",
            each,
        ),
        ("parameter_server_bytes", "server, per worker", "gradients up, parameters down", each),
        (
            "parameter_server_link_bytes",
            "server, its link",
            f"the same for each of {dp} workers, over one link",
            link,
        ),
    )
    return [
        Kind(name, label, description, value, _size(value), round(100 * value / link, 2))
        for name, label, description, value in rows
    ]


def _size(value: float) -> str:
    return formatting.memory(value) if value else "none"
