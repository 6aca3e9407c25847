"""Has the checkpoint that an attempt continues from on this node. Starts no ranks."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Final

from workers.contracts.wire.node_messages import LaunchOrder
from workers.launcher import command
from workers.launcher.checkpoint_pin import MANIFEST, pin_checkpoint
from workers.launcher.exits.classification import Verdict
from workers.launcher.rundir import RunDir
from workers.launcher.shipping.redis_link import Link
from workers.launcher.store_link import StoreLink

FETCH_PATIENCE_S: Final = 3600.0  # of the other nodes, while the first one reads a checkpoint
_POLL_S: Final = 0.15
_HINT: Final = "Resume from an older checkpoint."


def provide_checkpoint(
    order: LaunchOrder,
    run_dir: RunDir,
    link: Link,
    store: StoreLink,
    *,
    keep_waiting: Callable[[], bool],
) -> Verdict | None:
    """Why the attempt cannot continue; None if it can, or if it was stopped meanwhile.

    A fork's first attempt pins its parent's checkpoint, so that the parent may delete its own. A
    node that lacks the checkpoint reads its copy from the store. Raises Unlaunchable.
    """
    origin = order.resume_from
    if origin is None or not keep_waiting():
        return None
    home = command.node_home(run_dir, order)
    if origin.source is not None and pin_checkpoint(home, origin.source, origin.path):
        return None
    if (home / origin.path / MANIFEST).is_file():
        return None
    if origin.stored is not None and order.store is not None:
        started = time.monotonic()
        if order.nodes > 1 and order.node_rank > 0:
            problem = _wait_for_first_node(home / origin.path, keep_waiting)
        else:
            problem = store.fetch(
                origin.stored,
                home / origin.path,
                keep_waiting=keep_waiting,
                complete=lambda folder: (folder / MANIFEST).is_file(),
                hint=_HINT,
            )
        if not keep_waiting():
            return None
        if problem is None:
            seconds = round(time.monotonic() - started, 3)
            data = {"step": origin.step, "key": origin.stored, "seconds": seconds}
            link.report("event", {"type": "checkpoint_fetched", "data": data})
            return None
        message = f"The checkpoint of step {origin.step} cannot be read: {problem}"
        return Verdict("infrastructure", message, time=time.time())
    if origin.source is not None:
        raise command.Unlaunchable(
            f"The checkpoint of step {origin.step} that this run continues from is no longer "
            f"on this node ({home / origin.source}); fork from an existing one."
        )
    return None


def _wait_for_first_node(folder: Path, keep_waiting: Callable[[], bool]) -> str | None:
    """Wait until the first node has read the checkpoint into the shared directory."""
    deadline = time.monotonic() + FETCH_PATIENCE_S
    while not (folder / MANIFEST).is_file() and keep_waiting():
        if time.monotonic() > deadline:
            return "the first node did not read it from the store in time."
        time.sleep(_POLL_S)
    return None
