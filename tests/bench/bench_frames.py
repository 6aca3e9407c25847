"""State changes of runs per second, by 8 writers at once, on PostgreSQL.

Each transaction changes its own run and writes frames of the run and of `fleet`, as a node's report
does. Writers that lock one row in common run one after the other.
"""

from __future__ import annotations

import threading
import time
from typing import Any

from tests.bench.record import record
from tests.bench.stack import stack

WRITERS = 8
EACH = 60


def main() -> None:
    with stack(postgres=True):
        measure()


def measure() -> None:
    """One writer, then eight."""
    from tests import factories

    owner = factories.user("bench")
    runs = [factories.external_run(owner) for _ in range(WRITERS)]
    change(runs[0], 5)
    alone = rate(runs[:1])
    together = rate(runs)
    what = "state changes per second, one writer"
    record("frames", what=what, value=alone, unit="per s", digits=1)
    what = f"state changes per second, {WRITERS} writers"
    record("frames", what=what, value=together, unit="per s", digits=1, writers=WRITERS)


def rate(runs: list[Any]) -> float:
    """Transactions per second over all runs, each with a writer of its own."""
    threads = [threading.Thread(target=change, args=(run, EACH)) for run in runs]
    started = time.monotonic()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return EACH * len(runs) / (time.monotonic() - started)


def change(run: Any, count: int) -> None:
    """As many transactions, each open for 5 ms after it wrote its frames."""
    from django.db import connection, transaction

    from orchestrator.runs import live_frames

    for number in range(count):
        with transaction.atomic():
            type(run).objects.filter(pk=run.pk).update(priority=number)
            live_frames.run_state(run)
            with connection.cursor() as cursor:  # the rest of the report's work
                cursor.execute("SELECT pg_sleep(0.005)")
    if threading.current_thread() is not threading.main_thread():
        connection.close()


if __name__ == "__main__":
    main()
