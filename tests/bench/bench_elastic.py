"""An elastic training run that loses a node: time to its next step, and its curve in fp32.

Two nodes with two CPU slots each share run directories. An elastic run trains on four ranks; all
processes of the second node are killed. Counts from the `node_lost` event, when the node is
declared lost, to the end of the first step on two ranks, on which the run then ends: wall-clock
time of each part, and CPU time, which other programs do not lengthen. Its losses are
compared with those of a run on four ranks throughout. Growth is tested by `test_resume` (ranks) and
`test_elastic_runs` (control plane).
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from typing import Any

import psutil

from tests.bench.record import record
from tests.flows.embedded import Orrery
from tests.flows.test_two_nodes import SecondNode

STEPS = int(os.environ.get("STEPS", "80"))
LOST_AT, EVERY = 40, 10
PROGRAMS = {
    "supervisor": "workers.launcher",
    "torchrun": "torch.distributed.run",
    "rank": "workers.training.main",
}
SETTINGS = {"ORRERY_SHARED_RUNS": "1", "ORRERY_NODE_LOST_S": "20"}


def main() -> None:
    home = Path(tempfile.mkdtemp(prefix="orrery-bench-"))
    orrery = Orrery(home / "home", devices=2, environ=SETTINGS)
    second = SecondNode(orrery, orrery.home)
    try:
        orrery.start()
        second.start()
        orrery.until(lambda: len(orrery.get("nodes")["items"]) == 2, 300, "the second node")
        run = orrery.submit(spec(min_devices=2), name="elastic")
        orrery.until_step(run, LOST_AT, seconds=600)
        kill_node(second, orrery, run)
        orrery.until(lambda: first_step(orrery, run, 2), 300, "a step on two ranks")
        lost = orrery.events(run, "node_lost")
        assert len(lost) == 1, orrery.events(run, "node_lost", "state_changed")
        seconds = first_step(orrery, run, 2) - lost[0]["time"]
        cpu_s = cpu_of_start(orrery, run)
        parts = parts_of_restart(orrery, run, lost[0]["time"])
        ended = orrery.until_state(run, "finished", "failed", seconds=1800)
        assert ended == "finished", orrery.get(f"runs/{run}")["exit"]
        orrery.until(lambda: len(orrery.steps(run)) == STEPS, 120, "all steps are reported")
        sizes = [event["data"]["to"] for event in orrery.events(run, "resized")]
        assert sizes == [2], sizes
        second.start()  # the other run needs it
        fixed = orrery.submit(spec(), name="unbroken")
        assert orrery.until_state(fixed, "finished", "failed", seconds=1800) == "finished"
        orrery.until(lambda: len(orrery.steps(fixed)) == STEPS, 120, "all steps are reported")
        differences = [
            abs(ours - theirs)
            for ours, theirs in zip(losses(orrery, run), losses(orrery, fixed), strict=True)
        ]
        attempts = sorted(orrery.get(f"runs/{run}/attempts")["items"], key=lambda a: a["attempt"])
        resumed = [(each["resume_from"] or {}).get("step") for each in attempts]
    finally:
        second.close()
        orrery.close()
        shutil.rmtree(home, ignore_errors=True)
    record(
        "elastic",
        what="elastic shrink from 4 to 2 ranks: node declared lost to the next step",
        value=seconds,
        unit="s",
        figure="<= 15",
        digits=2,
        model="llama-tiny",
        resumed_from=resumed,
        after_s=parts,
    )
    record(
        "elastic",
        what="CPU time of that restart on its longest path: supervisor, torchrun, one rank",
        value=sum(cpu_s.values()),
        unit="s",
        digits=2,
        model="llama-tiny",
        cpu_s=cpu_s,
    )
    record(
        "elastic",
        what="largest difference of the loss on 4, then 2 ranks from an unbroken run, fp32",
        value=max(differences),
        unit="nats",
        figure="<= 1e-5",
        digits=9,
        steps=STEPS,
        by_tenth=[float(f"{max(part):.2g}") for part in tenths(differences)],
    )


def spec(**resources: Any) -> dict[str, Any]:
    plan = {"dp": 4, "zero": 1, "micro_batch_size": 1, "global_batch_size": 4}
    checkpoint = {"every_steps": EVERY, "keep": 2, "async": False}
    return {
        "kind": "train",
        "model": "llama-tiny",
        "plan": plan,
        "train": {
            "steps": STEPS,
            "seq_len": 64,
            "optimizer": {"name": "adamw", "lr": 1e-4},
            "checkpoint": checkpoint,
        },
        "resources": resources,
    }


def kill_node(second: SecondNode, orrery: Orrery, run: str) -> None:
    """End the agent, supervisor and ranks of the second node, as a power failure does."""
    assert second.process is not None
    attempt = orrery.get(f"runs/{run}/attempts")["items"][0]
    [share] = [each for each in attempt["placement"] if each["node"] == second.name]
    folder = f"{orrery.home}/runs/{run}/attempt-1/node-{share['node_rank']}"
    ended = [psutil.Process(second.process.pid)]
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            place = process.environ().get("ORRERY_RUN_DIR", "") + " ".join(process.cmdline())
            if folder in place:
                ended.append(process)
    for action in ("suspend", "kill"):  # none of them sees that another has ended
        for process in ended:
            with suppress(psutil.Error):
                getattr(process, action)()
    second.process.wait()


def first_step(orrery: Orrery, run: str, attempt: int) -> float:
    """Unix time of the attempt's first point; 0 before."""
    points = orrery.get(f"runs/{run}/series", name="step_time_s", attempt=attempt, raw=1, x="time")
    return float(points["x"][0]) if points["x"] else 0.0


def parts_of_restart(orrery: Orrery, run: str, lost: float) -> dict[str, float]:
    """Seconds from the loss of the node to the end of each part of the restart."""
    folder = orrery.folder(run, 2)
    second = next(a for a in orrery.get(f"runs/{run}/attempts")["items"] if a["attempt"] == 2)
    starts = [json.loads(path.read_text())["time"] for path in folder.glob("rank-*/process.json")]
    events = [each for each in orrery.events(run) if each["attempt"] == 2]
    [plan] = [each for each in events if each["type"] == "plan_resolved"]
    [restored] = [each for each in events if each["type"] == "checkpoint_restored"]
    times = {
        "placed": datetime.fromisoformat(second["created"]).timestamp(),
        "order at the node": (folder / "order.json").stat().st_mtime,
        "supervisor imported": (folder / "spec.json").stat().st_mtime,
        "ranks started by torchrun": max(starts),
        "ranks imported": plan["time"] - plan["data"]["setup_s"],
        "ranks joined, model built": plan["time"],
        "checkpoint read": restored["time"],
        "first step": first_step(orrery, run, 2),
    }
    return {name: round(time - lost, 2) for name, time in times.items()}


def cpu_of_start(orrery: Orrery, run: str) -> dict[str, float]:
    """CPU seconds so far of the second attempt's processes, of the slowest one of each kind."""
    spent = dict.fromkeys(PROGRAMS, 0.0)
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            words = process.cmdline()
            if not any(str(orrery.folder(run, 2)) in word for word in words):
                continue
            times = process.cpu_times()
            if name := part_of(words):
                spent[name] = max(spent[name], round(times.user + times.system, 2))
    assert all(seconds > 0 for seconds in spent.values()), spent
    return spent


def part_of(words: list[str]) -> str:
    """The part of a start that a command line runs, as a module or by code; empty for others."""
    for name, module in PROGRAMS.items():
        if any(module in word for word in words[1:4]):
            return name
    return ""


def tenths(values: list[float]) -> list[list[float]]:
    """The values in ten parts, in order."""
    size = max(1, len(values) // 10)
    return [values[start : start + size] for start in range(0, len(values), size)]


def losses(orrery: Orrery, run: str) -> list[float]:
    curve = orrery.get(f"runs/{run}/series", name="loss", raw=1)
    assert curve["x"] == list(range(1, STEPS + 1))
    return list(curve["y"])


if __name__ == "__main__":
    main()
