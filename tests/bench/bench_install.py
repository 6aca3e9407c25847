"""As a new user on one machine: a fresh clone, `make up`, and the first point of a run.

Downloads what the lock file names, unless the cache of pip or uv has it, so it only runs with
ORRERY_BENCH_INSTALL=1. Ends after 40 minutes: a loaded machine needs more than 20.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from tests.bench.record import record
from tests.flows.embedded import ROOT, Orrery, clean_environ, train_spec

MOST_S = 2400.0
INSTALLED, UP = "preparing the database", "Orrery is up"


def main() -> int:
    if os.environ.get("ORRERY_BENCH_INSTALL") != "1":
        print("bench_install downloads gigabytes; set ORRERY_BENCH_INSTALL=1 to run it")
        return 0
    folder = Path(tempfile.mkdtemp(prefix="orrery-bench-install-"))
    server, clone = Orrery(folder / "home"), folder / "orrery"
    began = time.monotonic()
    process = None
    try:
        subprocess.run(["git", "clone", "--quiet", f"file://{ROOT}", str(clone)], check=True)
        cloned = time.monotonic()
        more = {"ORRERY_HOME": str(server.home), "ORRERY_PORT": str(server.port)}
        output = folder / "output"
        with open(output, "wb") as log:
            process = subprocess.Popen(
                ["make", "up"],
                cwd=clone,
                env={**clean_environ(), **more},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        seen_at: dict[str, float] = {}
        while UP not in seen_at:
            text = output.read_text(errors="replace")
            for words in (INSTALLED, UP):
                if words in text:
                    seen_at.setdefault(words, time.monotonic())
            alive = process.poll() is None and time.monotonic() - began < MOST_S
            assert alive or UP in seen_at, text[-3000:]
            time.sleep(0.2)
        server.client = server.log_in("admin", "admin")
        submitted = time.monotonic()
        run = server.submit(train_spec(steps=30, ranks=1), "first")
        server.until_step(run, 1)
        seen = time.monotonic()
        record(
            "install",
            what="one machine: git clone until the first point of a run",
            value=seen - began,
            unit="s",
            digits=1,
            clone=round(cloned - began, 1),
            installation=round(seen_at[INSTALLED] - cloned, 1),
            start=round(seen_at[UP] - seen_at[INSTALLED], 1),
            submit_until_first_point=round(seen - submitted, 1),
        )
    finally:
        if process is not None and process.poll() is None:
            os.killpg(process.pid, signal.SIGTERM)
            process.wait(60)
        subprocess.run(["rm", "-rf", str(folder)])  # gigabytes: after the figure is recorded
    return 0


if __name__ == "__main__":
    sys.exit(main())
