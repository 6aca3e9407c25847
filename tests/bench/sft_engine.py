"""A contender of the LoRA benchmark: Orrery's engine on the job's rows, with all its telemetry."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np

from tests.bench.sft_job import spec
from tests.bench.turns import Turns


def main() -> None:
    turns, job, folder = (
        Turns(int(sys.argv[1])),
        json.loads(Path(sys.argv[2]).read_text()),
        Path(sys.argv[3]),
    )
    from workers.runtime.program import set_torch_defaults

    set_torch_defaults()  # as the command does before it loads torch
    import torch

    from tests.workers.training.row_ranks import as_json, train_rows
    from workers.training.data.rows import Row
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
    weights = np.zeros(job["seq_len"], np.float32)
    weights[job["prompt"] - 1 : job["seq_len"] - 1] = 1.0
    rows = [as_json(Row(np.array(ids, np.int64), weights, (0,))) for ids in job["rows"]]
    outcome = train_rows(spec(job), str(folder), rows)
    assert outcome["class"] == "ok", outcome
    points = [
        json.loads(line) for line in (folder / "rank-0" / "points.jsonl").read_text().splitlines()
    ]
    losses = [point["values"]["loss"] for point in points]
    turns.end(losses=losses, threads=torch.get_num_threads(), points=len(points))


if __name__ == "__main__":
    main()
