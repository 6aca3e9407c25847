"""A contender of the benchmark of a GRPO step: Orrery's run, with all its telemetry.

Answers have the job's lengths: the engine ends each one there, and no stop token ends it before.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from tests.bench.grpo_speed_job import spec
from tests.bench.turns import Turns


def main() -> None:
    turns = Turns(int(sys.argv[1]))
    job, folder = json.loads(Path(sys.argv[2]).read_text()), Path(sys.argv[3])
    from workers.runtime.program import set_torch_defaults

    set_torch_defaults()  # as the command does before it loads torch
    import torch

    from tests.workers.posttraining.policy_ranks import train_policy
    from workers.inference.engine import Engine
    from workers.training.loop.train import Loop

    run_steps, one_step, append = Loop.run_steps, Loop._one_step, Engine._append
    group, rows = job["group"], job["rows"]
    prompts: dict[int, int] = {}

    def begin(loop: Loop, start: Any) -> Any:
        turns.begin()
        return run_steps(loop, start)

    def stepped(loop: Loop) -> str | None:
        action = one_step(loop)
        turns.stepped()
        return action

    def append_to_length(engine: Engine, request: Any, sampled: Any) -> None:
        append(engine, request, sampled)
        number = prompts.setdefault(request.parent, len(prompts)) * group + request.answer
        length = job["lengths"][number // rows][number % rows]
        request.finish = "length" if len(request.output_tokens) >= length else None

    Loop.run_steps, Loop._one_step = begin, stepped  # type: ignore[method-assign]
    Engine._append = append_to_length  # type: ignore[method-assign]
    outcome = train_policy(spec(job), str(folder))
    assert outcome["class"] == "ok", outcome
    rollouts = [
        json.loads(line) for line in (folder / "rank-0" / "rollouts.jsonl").read_text().splitlines()
    ]
    points = [
        json.loads(line)["values"]
        for line in (folder / "rank-0" / "points.jsonl").read_text().splitlines()
    ]
    names = ("generation_s", "update_s", "sync_s")
    phases = {name: [each[name] for each in points if name in each] for name in names}
    tokens = [0] * job["steps"]
    for each in rollouts:
        tokens[each["step"] - 1] += len(each["token_ids"])
    turns.end(tokens=tokens, phases=phases, threads=torch.get_num_threads())


if __name__ == "__main__":
    main()
