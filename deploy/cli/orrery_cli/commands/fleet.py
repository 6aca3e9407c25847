"""`orrery nodes` and `orrery queue`: machines, and runs that wait."""

from __future__ import annotations

from typing import Annotated, Any, Optional

import typer

from orrery_cli.options import AsJson
from orrery_cli.output import age, clock_time, print_items, size

OptionalText = Optional[str]  # noqa: UP045  (Python 3.10 with older releases of typer)


def nodes(
    pool: Annotated[OptionalText, typer.Option(help="Nodes of this pool.")] = None,
    health: Annotated[OptionalText, typer.Option(help="up, silent or lost.")] = None,
    as_json: AsJson = False,
) -> None:
    """List nodes with their devices and health."""
    from orrery_cli.client import Client

    with Client() as client:
        rows = list(client.items("nodes", pool=pool, health=health))
    print_items(
        rows,
        ("node", "health", "pool", "devices", "memory", "note", "heartbeat"),
        lambda row: (
            row["name"],
            row["health"],
            row["pool"],
            _devices(row["devices"]),
            size(row["memory_bytes"]),
            _note(row),
            age(row["last_heartbeat"]),
        ),
        as_json=as_json,
        empty="No nodes. The page Fleet shows how to add one.",
        right=("memory", "heartbeat"),
    )


def queue(
    limit: Annotated[int, typer.Option("--limit", "-n", min=1, help="At most so many.")] = 50,
    as_json: AsJson = False,
) -> None:
    """List waiting runs in the order in which they start, with the reason."""
    from orrery_cli.client import Client

    with Client() as client:
        rows = list(client.items("queue", most=limit))
    print_items(
        rows,
        ("position", "run", "name", "owner", "devices", "pool", "waits", "may start", "reason"),
        lambda row: (
            row["position"],
            row["run"],
            row["name"],
            row["owner"],
            devices_range(row.get("min_devices"), row["devices"]),
            row["pool"],
            age(row["queued_at"]),
            clock_time(row["may_start"]),
            row["reason"],
        ),
        as_json=as_json,
        empty="No run waits.",
        right=("position", "run", "devices", "waits"),
    )


def devices_range(least: int | None, most: int) -> str:
    """The devices of a run: one number, or the range of an elastic run."""
    return f"{least}-{most}" if least is not None and least < most else str(most)


def _devices(devices: list[dict[str, Any]]) -> str:
    """`4 × cpu`, with the number of those that are not healthy."""
    names = [str(device["catalogue"] or device["name"]) for device in devices]
    text = ", ".join(f"{names.count(name)} × {name}" for name in dict.fromkeys(names))
    broken = sum(not device["healthy"] for device in devices)
    return f"{text} ({broken} not healthy)" if broken else text


def _note(row: dict[str, Any]) -> str:
    if row["drained"]:
        return f"drained: {row['drain_reason']}" if row["drain_reason"] else "drained"
    return "; ".join(f"cordoned: {cordon['reason']}" for cordon in row["cordons"])
