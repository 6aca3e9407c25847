"""A contender of the speed benchmark: Orrery's engine by its own command, with all its telemetry.

The benchmark only observes the end of each step.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from tests.bench.turns import Turns
from workers.runtime.program import set_torch_defaults
from workers.training import main as program


def main() -> None:
    turns, job, folder = (
        Turns(int(sys.argv[1])),
        json.loads(Path(sys.argv[2]).read_text()),
        Path(sys.argv[3]),
    )
    if "compiled" in sys.argv[4:]:
        job["spec"]["train"]["compile"] = True
    spec = folder / "run.json"
    spec.write_text(json.dumps(job["spec"]))
    set_torch_defaults()  # as the command does before it loads torch
    from workers.training.loop.train import Loop

    run_steps, one_step = Loop.run_steps, Loop._one_step

    def begin(loop: Loop, start: Any) -> Any:
        turns.begin()
        return run_steps(loop, start)

    def stepped(loop: Loop) -> str | None:
        action = one_step(loop)
        turns.stepped()
        return action

    Loop.run_steps, Loop._one_step = begin, stepped  # type: ignore[method-assign]
    code = program.main(["--spec", str(spec), "--dir", str(folder)])
    assert code == 0, (folder / "rank-0" / "exit.json").read_text()
    points = [
        json.loads(line) for line in (folder / "rank-0" / "points.jsonl").read_text().splitlines()
    ]
    import torch

    losses = [point["values"]["loss"] for point in points]
    turns.end(loss=sum(losses[-10:]) / 10, threads=torch.get_num_threads(), points=len(points))


if __name__ == "__main__":
    main()
