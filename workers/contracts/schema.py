"""Writes every contract's JSON Schema: `python -m workers.contracts.schema DIR`.

Nested contracts are included as `$defs`.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from workers.contracts.base import Contract, Problem
from workers.contracts.catalog.devices import Device
from workers.contracts.specs.cluster import ClusterSpec
from workers.contracts.specs.model import ModelSource, ModelSpec
from workers.contracts.specs.plan import ParallelPlan
from workers.contracts.specs.run import RunSpec
from workers.contracts.wire import node_messages
from workers.contracts.wire.points import Point, PointBatch, RunEvent

CONTRACTS: dict[str, type[Contract]] = {
    contract.__name__: contract
    for contract in (
        RunSpec,
        ModelSpec,
        ModelSource,
        ParallelPlan,
        ClusterSpec,
        Device,
        Point,
        PointBatch,
        RunEvent,
        Problem,
        node_messages.NodeInventory,
        node_messages.Heartbeat,
        node_messages.LaunchOrder,
        node_messages.ControlOrder,
        node_messages.ProbeOrder,
        node_messages.KeepOrder,
        node_messages.AttemptReport,
    )
}


def schema(name: str) -> dict[str, Any]:
    """JSON Schema (2020-12) of a contract by name. Raises ValueError listing the known names."""
    if name not in CONTRACTS:
        raise ValueError(f"{name!r} is not a contract. Use one of {', '.join(CONTRACTS)}.")
    return CONTRACTS[name].json_schema()


def write(directory: Path) -> list[Path]:
    """Write one `Name.json` per contract; returns the files."""
    directory.mkdir(parents=True, exist_ok=True)
    files = []
    for name in CONTRACTS:
        file = directory / f"{name}.json"
        file.write_text(json.dumps(schema(name), indent=2) + "\n", encoding="utf-8")
        files.append(file)
    return files


def main(arguments: list[str]) -> int:
    """Run the command; returns its exit code."""
    if len(arguments) != 1:
        print("usage: python -m workers.contracts.schema DIR", file=sys.stderr)
        return 2
    for file in write(Path(arguments[0])):
        print(file)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
