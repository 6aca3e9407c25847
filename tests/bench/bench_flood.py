"""A run that writes 200 MB of overwritten lines: memory and disk of its supervisor, time to cancel.

Ingest only acknowledges; nothing is stored in a database.
"""

from __future__ import annotations

import tempfile
import time
from pathlib import Path

from tests.bench.record import record
from tests.redis_server import RedisServer
from tests.workers.launcher.flood import FLOOD, LOUD, disk_bytes, peak_bytes
from tests.workers.launcher.harness import Node, script
from workers.launcher.rundir import write_json

BYTES = 200_000_000
MIB = 1024 * 1024


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        server = RedisServer(Path(folder)).start()
        node = Node(Path(folder) / "home", server.url)
        try:
            flood(node)
            cancel(node)
        finally:
            node.close()
            server.stop()


def flood(node: Node) -> None:
    order = node.order(script(FLOOD.replace("BYTES", str(BYTES))), ranks=1)
    run_dir = node.launch(order)
    peak, began = 0, time.monotonic()
    while not any(report["type"] == "exited" for report in list(node.reports)):
        peak = max(peak, peak_bytes(run_dir))
        time.sleep(0.02)
    seconds = time.monotonic() - began
    what = "200 MB of overwritten lines: the supervisor's peak memory"
    record("flood", what=what, value=peak / MIB, unit="MiB", figure="<= 150", digits=1, s=seconds)
    what = "200 MB of overwritten lines: disk space of the run directory at the end"
    size = disk_bytes(run_dir) / MIB
    record("flood", what=what, value=size, unit="MiB", figure="<= 512", digits=1)


def cancel(node: Node) -> None:
    order = node.order(script(LOUD.replace("BYTES", "10**12")), ranks=1, run="8")
    run_dir = node.launch(order)
    peak = disk = 0
    until = time.monotonic() + 15
    while time.monotonic() < until:
        peak, disk = max(peak, peak_bytes(run_dir)), max(disk, disk_bytes(run_dir))
        time.sleep(0.05)
    requested = time.monotonic()
    request = {"action": "cancel", "attempt_id": "81", "fence": order["fence"], "grace_s": 2.0}
    write_json(run_dir.request, request)
    node.exited(order)
    what = "endless lines: from the request to cancel to the exit report"
    value = time.monotonic() - requested
    record("flood", what=what, value=value, unit="s", figure="<= 10", digits=2)
    what = "endless lines for 15 s: the supervisor's peak memory"
    record("flood", what=what, value=peak / MIB, unit="MiB", figure="<= 150", digits=1)
    what = "endless lines for 15 s: largest disk space of the run directory"
    record("flood", what=what, value=disk / MIB, unit="MiB", figure="<= 512", digits=1)


if __name__ == "__main__":
    main()
