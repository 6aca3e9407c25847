"""What a device sends in a step, by kind of parallelism, and data parallel by ring beside a
parameter server. Pure.

Volumes count as the planner's: see `orchestrator/planner/README.md`, conventions.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from webui.presentation import formatting

KINDS: Final = (
    ("dp_bytes", "data", "gradients and sharded weights"),
    ("tp_bytes", "tensor", "activations of every layer"),
    ("pp_bytes", "pipeline", "activations between stages"),
    ("cp_bytes", "context", "keys and values around the ring"),
    ("ep_bytes", "expert", "tokens to their experts and back"),
)
CALLS: Final = (
    (
        "all_reduce_bytes",
        "all-reduce",
        "by its buffer: gradients of copies, activations of tensor ranks",
    ),
    ("all_gather_bytes", "all-gather", "by its output: sharded weights, sequences of tensor ranks"),
    (
        "reduce_scatter_bytes",
        "reduce-scatter",
        "by its input: sharded gradients, activations of tensor ranks",
    ),
    ("broadcast_bytes", "broadcast", "by its tensor: weights that ZeRO 1 has updated"),
    ("all_to_all_bytes", "all-to-all", "tokens to their experts and back"),
    ("send_bytes", "send", "activations and their gradients between stages"),
)


@dataclass(frozen=True, slots=True)
class Kind:
    name: str
    word: str
    what: str
    bytes: float
    says: str
    share: float


def kinds(comm: Mapping[str, Any]) -> list[Kind]:
    """Every kind, those without traffic too: nothing is moved by a group of one."""
    return _kinds(KINDS, comm)


def calls(collectives: Mapping[str, Any] | None) -> list[Kind]:
    """What the engine hands to each kind of collective; empty where that is not counted, or nothing
    is sent.
    """
    found = _kinds(CALLS, collectives or {})
    return found if any(kind.bytes for kind in found) else []


def _kinds(known: tuple[tuple[str, str, str], ...], given: Mapping[str, Any]) -> list[Kind]:
    held = {name: formatting.number(given.get(name)) or 0.0 for name, _, _ in known}
    most = max(held.values()) or 1.0
    return [
        Kind(name, word, what, held[name], _size(held[name]), round(100 * held[name] / most, 2))
        for name, word, what in known
    ]


def summary(comm: Mapping[str, Any]) -> str:
    found = sorted((kind for kind in kinds(comm) if kind.bytes), key=lambda kind: -kind.bytes)
    if not found:
        return "Nothing leaves a device."
    total = _size(sum(kind.bytes for kind in found))
    return (
        f"{total} a device and step: "
        f"{formatting.listed([f'{kind.word} parallel {kind.says}' for kind in found])}."
    )


def servers(each: float, link: float, dp: int) -> list[Kind]:
    """Gradients by ring all-reduce beside the textbooks' parameter server; empty without data
    parallelism.

    `each` is what a device moves in a step either way, `link` what passes the one server's link.
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
        ("parameter_server_bytes", "server, a worker", "gradients up, parameters down", each),
        (
            "parameter_server_link_bytes",
            "server, its link",
            f"the same for each of {dp} workers, over one link",
            link,
        ),
    )
    return [
        Kind(name, word, what, value, _size(value), round(100 * value / link, 2))
        for name, word, what, value in rows
    ]


def _size(value: float) -> str:
    return formatting.memory(value) if value else "none"
