"""The end of an attempt: ships telemetry, reports the exit, waits for copies to the store."""

from __future__ import annotations

import contextlib
import time

from workers.launcher.exits.classification import Verdict
from workers.launcher.rundir import SHIPPING, RunDir, read_json, write_json
from workers.launcher.shipping.redis_link import Link
from workers.launcher.shipping.telemetry_sender import TelemetrySender
from workers.launcher.store_link import StoreLink

SETTLE_S = 5.0  # how long the exit report waits for telemetry to be acknowledged
# how long the exit report waits for Redis; after that the agent reports it at its next start
REDIS_PATIENCE_S = 3600.0


def send(
    verdict: Verdict,
    run_dir: RunDir,
    link: Link,
    sender: TelemetrySender,
    store: StoreLink,
    *,
    urgent_s: float | None,
    store_patience_s: float,
) -> None:
    """Ship telemetry, then report `exited`, then ship the rest until all is committed.

    `urgent_s`: this process must end soon; it waits this long for telemetry and leaves the rest to
    the agent. `store_patience_s`: how long it waits for copies to the store otherwise.
    """
    report = verdict.to_dict()
    for message in sender.skipped():
        print(message, flush=True)
    deadline = time.monotonic() + REDIS_PATIENCE_S
    sender.settle(SETTLE_S if urgent_s is None else urgent_s, deadline=deadline)
    link.report("exited", report)
    while not link.flush() and time.monotonic() < deadline:
        time.sleep(0.2)
    settled = sender.settled()
    if not settled and urgent_s is None:
        # the run has ended, but ingest may be down: points must not be lost
        _record_shipping(run_dir)
        settled = sender.settle(REDIS_PATIENCE_S, deadline=deadline)
    copied = _settle_store(
        run_dir, link, store, wait_s=store_patience_s if urgent_s is None else None
    )
    with contextlib.suppress(OSError):
        sender.save()
        # otherwise the agent finishes the work at its next start
        complete = link.flush() and copied and (settled or time.monotonic() >= deadline)
        write_json(run_dir.exit, {**report, "reported": complete})


def _settle_store(run_dir: RunDir, link: Link, store: StoreLink, *, wait_s: float | None) -> bool:
    """Wait for copies to the store; False if the agent must continue them at its next start."""
    if not store.pending:
        store.close()
        return True
    if wait_s is None:
        store.close()
        return False
    _record_shipping(run_dir)
    store.settle(wait_s, flush=link.flush)
    return True


def _record_shipping(run_dir: RunDir) -> None:
    with contextlib.suppress(OSError):
        write_json(run_dir.supervisor, {**read_json(run_dir.supervisor), "state": SHIPPING})
