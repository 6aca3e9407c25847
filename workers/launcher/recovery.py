"""Recovery of an attempt whose supervisor died: kills its processes, ships its outbox, reports.

Called by agents at start and when they detect it. Restarts nothing.
"""

from __future__ import annotations

import contextlib
import time
from pathlib import Path
from typing import Any

from workers.contracts.wire.node_messages import LaunchOrder
from workers.launcher import processes
from workers.launcher.exits.classification import Verdict
from workers.launcher.isolation import containers
from workers.launcher.rundir import RunDir, read_json, write_json
from workers.launcher.shipping.final_report import SETTLE_S
from workers.launcher.shipping.rank_exits import read_rank_exits
from workers.launcher.shipping.redis_link import Link
from workers.launcher.shipping.telemetry_sender import TelemetrySender
from workers.launcher.store_link import StoreLink
from workers.launcher.supervisor import STORE_PATIENCE_S

_REQUESTED = {
    "cancel": ("cancelled", "Cancelled on request."),
    "kill": ("cancelled", "Killed by the control plane."),
    "pause": ("preempted", "Paused on request."),
    "preempt": ("preempted", "Preempted on request."),
}


def supervisor_alive(run_dir: RunDir) -> bool:
    """Whether the supervisor that `supervisor.json` names still lives."""
    data = read_json(run_dir.supervisor)
    try:
        return bool(data) and processes.is_alive(int(data["pid"]), float(data["start_time"] or 0.0))
    except (KeyError, TypeError, ValueError):  # the run's programs may have changed the file
        return False


def is_reported(run_dir: RunDir) -> bool:
    """Whether the attempt's exit was reported to the control plane."""
    return bool(read_json(run_dir.exit).get("reported"))


def recover(
    run_dir: RunDir,
    node_file: Path,
    *,
    patience_s: float = 3600.0,
    store_patience_s: float = STORE_PATIENCE_S,
) -> dict[str, Any] | None:
    """Report `exited` for a directory without a living supervisor; None if Redis stays unreachable
    for `patience_s`. `store_patience_s`: how long copies to the store are waited for.
    """
    order = LaunchOrder.from_dict(read_json(run_dir.order))
    link = Link(node_file, order)
    left = processes.kill_all(order.fence, node=link.node.node)
    containers.remove(order)  # its processes may belong to the runtime's daemon
    sender = TelemetrySender(run_dir, order, link, on_event=lambda row: None)
    store = StoreLink(run_dir, order, link)  # with the copies that the supervisor left
    deadline = time.monotonic() + patience_s
    sender.settle(SETTLE_S, deadline=deadline)
    report = read_json(run_dir.exit) or _verdict(run_dir, order, sender, left).to_dict()
    report.pop("reported", None)
    link.report("exited", report)
    while not link.flush():
        if time.monotonic() > deadline:
            return None
        time.sleep(0.2)
    sender.settle(patience_s, deadline=deadline)  # ingest may be down for a while
    store.settle(store_patience_s, flush=link.flush)
    with contextlib.suppress(OSError):
        sender.save()
        write_json(run_dir.exit, {**report, "reported": True})
    return report


def _verdict(
    run_dir: RunDir, order: LaunchOrder, sender: TelemetrySender, left: list[int]
) -> Verdict:
    ranks = range(order.rank_offset, order.rank_offset + order.local_ranks)
    ends = read_rank_exits(run_dir, ranks, sender.collectors)
    if len(ends) == len(ranks) and all(end.code == 0 for end in ends):
        return Verdict(
            "ok", "All ranks finished after their supervisor died.", code=0, time=time.time()
        )
    action = read_json(run_dir.request).get("action")
    if action in _REQUESTED:
        return Verdict(*_REQUESTED[action], time=time.time())
    if not run_dir.supervisor.exists():
        message = "The attempt's supervisor did not start; see supervisor.log in its run directory."
    else:
        message = (
            "The attempt's supervisor died (killed, or the machine restarted); its ranks "
            "were killed."
        )
    if left:
        message += f" Processes {left} cannot be killed."
    return Verdict("infrastructure", message, time=time.time())
