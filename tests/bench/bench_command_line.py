"""Cold start of `orrery --version` and of `orrery runs` against a server on this machine."""

from __future__ import annotations

import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from tests.bench.record import ROOT, record
from tests.flows.embedded import Orrery, clean_environ

ROUNDS = 15


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        server = Orrery(Path(folder) / "home", devices=1)
        try:
            server.start()
            assert server.client is not None
            environ = {
                **clean_environ(),
                "PYTHONPATH": str(ROOT / "deploy" / "cli"),
                "XDG_CONFIG_HOME": folder,
                "ORRERY_URL": server.url,
                "ORRERY_TOKEN": server.client.headers["Authorization"].removeprefix("Bearer "),
            }
            measure(environ, ["--version"], "<= 300")
            measure(environ, ["runs"], "<= 500")
        finally:
            server.close()


def measure(environ: dict[str, str], arguments: list[str], figure: str) -> None:
    """Median wall-clock time of new processes, and their CPU time."""
    command = [sys.executable, "-m", "orrery_cli", *arguments]
    subprocess.run(command, env=environ, check=True, capture_output=True)  # writes bytecode
    seconds, before = [], resource.getrusage(resource.RUSAGE_CHILDREN)
    for _ in range(ROUNDS):
        started = time.perf_counter()
        subprocess.run(command, env=environ, check=True, capture_output=True)
        seconds.append(time.perf_counter() - started)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu_s = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    record(
        "command_line",
        what=f"orrery {' '.join(arguments)}, cold start to output, median",
        value=statistics.median(seconds) * 1000,
        unit="ms",
        figure=figure,
        digits=1,
        fastest_ms=round(min(seconds) * 1000, 1),
        slowest_ms=round(max(seconds) * 1000, 1),
        cpu_ms=round(cpu_s / ROUNDS * 1000, 1),
        cores=os.cpu_count(),
    )


if __name__ == "__main__":
    main()
