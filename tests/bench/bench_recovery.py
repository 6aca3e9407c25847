"""What a checkpoint costs the training, and how soon a run steps again after a rank was killed: 15M model on a CPU.

The stall of an asynchronous save is held against a synchronous one of the same tensors; of each the first save, which
allocates, is left out and told apart. Recovery counts from SIGKILL to the first step of the next attempt, through
supervisor, control plane, scheduler, restart and restore.
"""

from __future__ import annotations

import json
import os
import signal
import statistics
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any

from tests.bench.record import record
from tests.flows.embedded import Orrery

RANKS = 2
SAVES = 5
KILLS = 3


def main() -> None:
    home = Path(tempfile.mkdtemp(prefix="orrery-bench-"))
    orrery = Orrery(home / "home", devices=RANKS)
    orrery.start()
    try:
        stalls(orrery)
        recovery(orrery)
    finally:
        orrery.close()


def spec(*, steps: int, every: int, asynchronous: bool) -> dict[str, Any]:
    plan = {"dp": RANKS, "zero": 1, "micro_batch_size": 1, "global_batch_size": RANKS}
    checkpoint = {"every_steps": every, "keep": 2, "async": asynchronous}
    return {
        "kind": "train", "model": "llama-15m", "plan": plan,
        "train": {"steps": steps, "seq_len": 64, "checkpoint": checkpoint},
    }  # fmt: skip


def stalls(orrery: Orrery) -> None:
    """Saves far enough apart that one has ended before the next begins."""
    seconds: dict[bool, list[float]] = {}
    for asynchronous in (False, True):
        run = orrery.submit(spec(steps=20 * SAVES, every=20, asynchronous=asynchronous), name=f"async {asynchronous}")
        assert orrery.until_state(run, "finished", "failed", seconds=1200) == "finished"
        events = orrery.get(f"runs/{run}/events", type="checkpoint_saved", limit=200)["items"]
        seconds[asynchronous] = [event["data"]["stall_s"] for event in events]
    whole, held = (statistics.median(seconds[kind][1:]) for kind in (False, True))
    record("recovery", what="a synchronous save, 15M model, 2 ranks", value=whole, unit="s", saves=SAVES)
    record("recovery", what="stall of the training by an asynchronous save", value=held, unit="s", saves=SAVES)
    record("recovery", what="stall of the first asynchronous save", value=seconds[True][0], unit="s")
    share = 100 * held / whole
    record("recovery", what="asynchronous stall, share of a synchronous save", value=share, unit="%", figure="<= 5")


def recovery(orrery: Orrery) -> None:
    run = orrery.submit(spec(steps=100_000, every=5, asynchronous=True), name="killed")
    took = []
    for attempt in range(1, KILLS + 1):
        folder = orrery.home / "runs" / run / f"attempt-{attempt}"
        orrery.until(partial(stepped, folder, 12), 600, f"attempt {attempt} is under way")
        pid = json.loads((folder / f"rank-{attempt % RANKS}" / "process.json").read_text())["pid"]
        killed = time.monotonic()
        os.kill(pid, signal.SIGKILL)
        following = orrery.home / "runs" / run / f"attempt-{attempt + 1}"
        orrery.until(partial(stepped, following, 0), 600, "a step of the next attempt")
        took.append(time.monotonic() - killed)
    worst = max(took)
    each = [round(seconds, 2) for seconds in took]
    record("recovery", what="rank killed to first step again, worst", value=worst, unit="s", figure="<= 20", each=each)
    assert orrery.client is not None
    orrery.client.post(f"runs/{run}/cancel")
    orrery.until_state(run, "cancelled", seconds=120)


def stepped(folder: Path, more_than: int) -> bool:
    path = folder / "rank-0" / "points.jsonl"
    return path.exists() and len(path.read_text().splitlines()) > more_than


if __name__ == "__main__":
    main()
