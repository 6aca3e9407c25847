"""Cost of scheduling passes: nothing to do, and placing gangs, with 10,000 runs waiting.

`--sqlite` uses SQLite in place of PostgreSQL, `--small` a tenth of everything.
"""

from __future__ import annotations

import argparse
import statistics
import time
from typing import Any

from tests.bench.record import record
from tests.bench.stack import stack

IDLE_ROUNDS = 40
VERSIONS = ("release", "wire")  # of the nodes, as their agents report them
_rest: list[Any] = [None]  # of the previous pass, as in the scheduler's loop


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sqlite", action="store_true")
    parser.add_argument("--small", action="store_true")
    args, _ = parser.parse_known_args()
    part = 10 if args.small else 1
    with stack(postgres=not args.sqlite):
        measure(1000 // part, 10_000 // part, "sqlite" if args.sqlite else "postgresql")


def measure(nodes: int, waiting: int, database: str) -> None:
    """Fill the fleet, place one gang of 8 per node, and measure idle passes afterwards."""
    from orchestrator.scheduling import services  # noqa: F401  # its import is not part of a pass
    from tests import factories

    owner = factories.user("bench")
    fill(owner, nodes, waiting)
    more: dict[str, Any] = {"nodes": nodes, "devices": 8 * nodes, "waiting": waiting}
    more["database"] = database
    spent, placed, longest, cpu = 0.0, 0, 0.0, time.process_time()
    while placed < nodes:
        seconds, count = one_pass()
        spent, longest, placed = spent + seconds, max(longest, seconds), placed + count
    cpu = round(time.process_time() - cpu, 2)  # of this process, without PostgreSQL's
    name = f"{nodes:,} placements of 8 devices, all passes"
    record("tick", what=name, value=spent, unit="s", figure="<= 3", cpu_s=cpu, **more)
    record("tick", what="longest pass meanwhile", value=longest, unit="s", **more)
    rate = placed / spent
    record("tick", what="gang placements", value=rate, unit="per s", figure=">= 300", **more)
    settling = [one_pass()[0] for _ in range(waiting // 2000 + 3)]
    idle = [one_pass()[0] for _ in range(IDLE_ROUNDS)]
    p95 = statistics.quantiles(idle, n=20)[-1]
    record("tick", what="idle pass, p95", value=p95, unit="s", figure="<= 0.15", **more)
    longest = max(settling)
    record("tick", what="longest pass that decides again", value=longest, unit="s", **more)


def one_pass() -> tuple[float, int]:
    """Run a pass; returns its seconds and the number of runs that it placed."""
    from orchestrator.scheduling import services

    started = time.perf_counter()
    result = services.tick(rest=_rest[0])
    _rest[0] = result.rest
    return time.perf_counter() - started, len(result.placed)


def fill(owner: Any, nodes: int, waiting: int) -> None:
    """Write nodes of 8 GPUs that have joined, and queued runs for 8 devices each."""
    from django.apps import apps

    from tests import factories

    node_model, device_model = apps.get_model("fleet", "Node"), apps.get_model("fleet", "Device")
    first = factories.node("n0000", devices=8, kind="gpu", catalogue="h100-80g")
    names = [f"n{number:04}" for number in range(1, nodes)]
    same = {
        field: getattr(first, field)
        for field in ("cluster_id", "pool_id", "address", "join_token_id", "join_nonces", *VERSIONS)
    }
    rows = node_model.objects.bulk_create(node_model(name=name, **same) for name in names)
    gpu = {"kind": "gpu", "name": "H100", "catalogue": "h100-80g"}
    device_model.objects.bulk_create(
        (device_model(node=row, index=index, **gpu) for row in rows for index in range(8)),
        batch_size=500,
    )
    template = factories.run(owner, devices=8)
    run_model = apps.get_model("runs", "Run")
    copied = ("kind", "spec", "plan", "devices", "pool_name", "owner_id")
    values = {name: getattr(template, name) for name in copied}
    run_model.objects.bulk_create(
        (run_model(name=f"run {number}", **values) for number in range(1, waiting)),
        batch_size=500,
    )


if __name__ == "__main__":
    main()
