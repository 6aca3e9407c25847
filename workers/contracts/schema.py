"""Writes every contract's JSON Schema: `python -m workers.contracts.schema DIR`.

Knows which contracts stand on their own; their parts come along as `$defs`.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from workers.contracts import node
from workers.contracts.base import Contract, Problem
from workers.contracts.cluster import ClusterSpec
from workers.contracts.devices import Device
from workers.contracts.model import ModelSource, ModelSpec
from workers.contracts.plan import ParallelPlan
from workers.contracts.points import Point, PointBatch, RunEvent
from workers.contracts.run import RunSpec

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
        node.NodeInventory,
        node.Heartbeat,
        node.LaunchOrder,
        node.ControlOrder,
        node.ProbeOrder,
        node.KeepOrder,
        node.AttemptReport,
    )
}


def schema(name: str) -> dict[str, Any]:
    """JSON Schema (2020-12) of one contract by its name; raises ValueError naming those there are."""
    if name not in CONTRACTS:
        raise ValueError(f"{name!r} is not a contract; try one of {', '.join(CONTRACTS)}")
    return CONTRACTS[name].json_schema()


def write(directory: Path) -> list[Path]:
    """One `Name.json` a contract; returns the files."""
    directory.mkdir(parents=True, exist_ok=True)
    files = []
    for name in CONTRACTS:
        file = directory / f"{name}.json"
        file.write_text(json.dumps(schema(name), indent=2) + "\n", encoding="utf-8")
        files.append(file)
    return files


def main(arguments: list[str]) -> int:
    if len(arguments) != 1:
        print("usage: python -m workers.contracts.schema DIR", file=sys.stderr)
        return 2
    for file in write(Path(arguments[0])):
        print(file)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
