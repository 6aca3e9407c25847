"""Cost of a checkpoint, time to recover from a killed rank, time to detect a hang; 15M, on a CPU.

The stall of an asynchronous save is compared with a synchronous save of the same tensors. The first
save, which allocates memory, is excluded and recorded separately. Recovery counts from SIGKILL to
the first step of the next attempt, through supervisor, control plane, scheduler, restart and
restore. A hang counts from SIGSTOP until REST has its event.
"""

from __future__ import annotations

import json
import os
import shutil
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
HANGS = 3


def main() -> None:
    home = Path(tempfile.mkdtemp(prefix="orrery-bench-"))
    orrery = Orrery(home / "home", devices=RANKS)
    orrery.start()
    try:
        stalls(orrery)
        recovery(orrery)
        hangs(orrery)
    finally:
        orrery.close()
        shutil.rmtree(home, ignore_errors=True)


def spec(*, steps: int, every: int, asynchronous: bool) -> dict[str, Any]:
    plan = {"dp": RANKS, "zero": 1, "micro_batch_size": 1, "global_batch_size": RANKS}
    checkpoint = {"every_steps": every, "keep": 2, "async": asynchronous}
    return {
        "kind": "train",
        "model": "llama-15m",
        "plan": plan,
        "train": {"steps": steps, "seq_len": 64, "checkpoint": checkpoint},
    }


def stalls(orrery: Orrery) -> None:
    """Stalls of saves; each save ends before the next begins."""
    seconds: dict[bool, list[float]] = {}
    for asynchronous in (False, True):
        run = orrery.submit(
            spec(steps=20 * SAVES, every=20, asynchronous=asynchronous),
            name=f"async {asynchronous}",
        )
        assert orrery.until_state(run, "finished", "failed", seconds=1200) == "finished"
        events = orrery.get(f"runs/{run}/events", type="checkpoint_saved", limit=200)["items"]
        seconds[asynchronous] = [event["data"]["stall_s"] for event in events]
    synchronous_s, stall_s = (statistics.median(seconds[kind][1:]) for kind in (False, True))
    record(
        "recovery",
        what="a synchronous save, 15M model, 2 ranks",
        value=synchronous_s,
        unit="s",
        saves=SAVES,
    )
    record(
        "recovery",
        what="stall of the training by an asynchronous save",
        value=stall_s,
        unit="s",
        saves=SAVES,
    )
    record(
        "recovery", what="stall of the first asynchronous save", value=seconds[True][0], unit="s"
    )
    share = 100 * stall_s / synchronous_s
    record(
        "recovery",
        what="asynchronous stall, share of a synchronous save",
        value=share,
        unit="%",
        figure="<= 5",
    )


def recovery(orrery: Orrery) -> None:
    """Time from a killed rank to the first step of the next attempt."""
    run = orrery.submit(spec(steps=100_000, every=5, asynchronous=True), name="killed")
    took = []
    for attempt in range(1, KILLS + 1):
        folder = orrery.home / "runs" / run / f"attempt-{attempt}"
        orrery.until(partial(stepped, folder, 12), 600, f"attempt {attempt} runs")
        pid = json.loads((folder / f"rank-{attempt % RANKS}" / "process.json").read_text())["pid"]
        killed = time.monotonic()
        os.kill(pid, signal.SIGKILL)
        following = orrery.home / "runs" / run / f"attempt-{attempt + 1}"
        orrery.until(partial(stepped, following, 0), 600, "a step of the next attempt")
        took.append(time.monotonic() - killed)
    worst = max(took)
    each = [round(seconds, 2) for seconds in took]
    record(
        "recovery",
        what="rank killed to first step again, worst",
        value=worst,
        unit="s",
        figure="<= 20",
        each=each,
    )
    cancel(orrery, run)


def hangs(orrery: Orrery) -> None:
    """Time to detect a hang: one rank stops and continues, several times in one attempt."""
    run = orrery.submit(spec(steps=100_000, every=100_000, asynchronous=True), name="hanging")
    folder = orrery.home / "runs" / run / "attempt-1"
    took = []
    for number in range(1, HANGS + 1):
        orrery.until(partial(stepped, folder, 30 * number), 600, "more steps")
        pid = json.loads((folder / f"rank-{number % RANKS}" / "process.json").read_text())["pid"]
        stopped = time.monotonic()
        os.kill(pid, signal.SIGSTOP)
        try:
            orrery.until(partial(has_events, orrery, run, "hang", number), 120, "the hang event")
            took.append(time.monotonic() - stopped)
        finally:
            os.kill(pid, signal.SIGCONT)
    events = orrery.get(f"runs/{run}/events", type="hang", limit=20)["items"]
    assert [event["rank"] for event in events] == [
        number % RANKS for number in range(1, HANGS + 1)
    ], events
    points = [
        json.loads(line) for line in (folder / "rank-0" / "points.jsonl").read_text().splitlines()
    ]
    step_s = statistics.median(point["values"]["step_time_s"] for point in points)
    record(
        "recovery",
        # row name since version 0.1
        what="a rank stopped until the hang is told by rank, worst",
        value=max(took),
        unit="s",
        figure=f"<= {max(10.0, 3 * step_s):.2f}",
        each=[round(seconds, 2) for seconds in took],
        step_s=round(step_s, 3),
    )
    cancel(orrery, run)


def has_events(orrery: Orrery, run: str, type_: str, count: int) -> bool:
    return len(orrery.get(f"runs/{run}/events", type=type_, limit=20)["items"]) >= count


def cancel(orrery: Orrery, run: str) -> None:
    assert orrery.client is not None
    orrery.client.post(f"runs/{run}/cancel")
    orrery.until_state(run, "cancelled", seconds=120)


def stepped(folder: Path, more_than: int) -> bool:
    path = folder / "rank-0" / "points.jsonl"
    return path.exists() and len(path.read_text().splitlines()) > more_than


if __name__ == "__main__":
    main()
