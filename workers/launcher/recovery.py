"""What remains to be done for an attempt whose supervisor is gone: end its processes, ship its
outbox, report its end.

Called by agents, at their start and when they notice it. Does not start anything again.
"""

from __future__ import annotations

import contextlib
import time
from pathlib import Path
from typing import Any

from workers.contracts.wire.node_messages import LaunchOrder
from workers.launcher import processes
from workers.launcher.exit_verdict import Verdict
from workers.launcher.rundir import RunDir, read_json, write_json
from workers.launcher.shipping.redis_link import Link
from workers.launcher.shipping.telemetry_sender import Shipping
from workers.launcher.supervisor import SETTLE_S, rank_ends

_WORDS = {
    "cancel": ("cancelled", "Cancelled on request."),
    "kill": ("cancelled", "Ended by order of the control plane."),
    "pause": ("preempted", "Paused on request."),
    "preempt": ("preempted", "Asked to make room."),
}


def supervisor_alive(run_dir: RunDir) -> bool:
    """Whether the very supervisor that this directory names still lives."""
    told = read_json(run_dir.supervisor)
    return bool(told) and processes.is_alive(int(told["pid"]), float(told["start_time"] or 0.0))


def reported(run_dir: RunDir) -> bool:
    """Whether the control plane has been told how the attempt ended here."""
    return bool(read_json(run_dir.exit).get("reported"))


def recover(
    run_dir: RunDir, node_file: Path, *, patience_s: float = 600.0
) -> dict[str, Any] | None:
    """Reports `exited` for a directory without a living supervisor; None while Redis stays away for
    `patience_s`.
    """
    order = LaunchOrder.from_dict(read_json(run_dir.order))
    link = Link(node_file, order)
    left = processes.end_all(order.fence, node=link.node.node)
    shipping = Shipping(run_dir, order, link, on_event=lambda row: None)
    deadline = time.monotonic() + patience_s
    settled_by = time.monotonic() + SETTLE_S
    while time.monotonic() < min(deadline, settled_by):
        with contextlib.suppress(OSError):
            shipping.pump(final=True)
            if link.acked() is None:
                settled_by = time.monotonic() + SETTLE_S
            elif shipping.settled():
                break
        time.sleep(0.1)
    told = read_json(run_dir.exit) or _verdict(run_dir, order, shipping, left).to_dict()
    told.pop("reported", None)
    link.report("exited", told)
    while not link.flush():
        if time.monotonic() > deadline:
            return None
        time.sleep(0.2)
    with contextlib.suppress(OSError):
        shipping.save()
        write_json(run_dir.exit, {**told, "reported": True})
    return told


def _verdict(run_dir: RunDir, order: LaunchOrder, shipping: Shipping, left: list[int]) -> Verdict:
    ranks = range(order.rank_offset, order.rank_offset + order.local_ranks)
    ends = rank_ends(run_dir, ranks, shipping)
    if len(ends) == len(ranks) and all(end.code == 0 for end in ends):
        return Verdict(
            "ok", "All ranks finished; their supervisor was gone by then.", code=0, time=time.time()
        )
    asked = read_json(run_dir.request).get("action")
    if asked in _WORDS:
        return Verdict(*_WORDS[asked], time=time.time())
    if not run_dir.supervisor.exists():
        message = "The attempt's supervisor did not start; see supervisor.log in its run directory."
    else:
        message = (
            "The attempt's supervisor was gone (killed, or the machine restarted); its ranks "
            "were ended."
        )
    if left:
        message += f" Processes {left} do not end."
    return Verdict("infrastructure", message, time=time.time())
