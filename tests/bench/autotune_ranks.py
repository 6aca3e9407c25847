"""Ranks of `bench_autotune`: train every plan in alternating order, in one set of processes.

`torchrun … -m tests.bench.autotune_ranks --dir DIR --steps N --turns T` reads DIR/spec.json and
DIR/trials.json and writes DIR/times.json: mean step times by plan, one per turn.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from statistics import fmean

from workers.metrics.beacon import Beacon
from workers.runtime.environment import read_environment
from workers.runtime.program import leave, set_torch_defaults
from workers.training.setup.spec_loading import load_run
from workers.training.trials.state import plans_of, read_order

WARM_UP = 5  # steps of each turn that do not count


def main(arguments: list[str]) -> int:
    def option(name: str) -> str:
        return arguments[arguments.index(name) + 1]

    directory, steps, turns = Path(option("--dir")), int(option("--steps")), int(option("--turns"))
    environment = read_environment(directory)
    run, (order, _) = load_run(directory / "spec.json"), read_order(directory)
    set_torch_defaults()
    from workers.training.trials.runner import Trials
    from workers.training.trials.trial import Trial, trial_run

    trials = Trials(run, order, environment, began=0.0)
    environment.rank_directory.mkdir(parents=True, exist_ok=True)
    trials.beacon = Beacon(environment.rank_directory, stages=environment.world_size)
    plans = plans_of(order)
    samples, _ = trials.open_samples(trials.world_of(run.plan))
    times: dict[int, list[float]] = {index: [] for index in plans}
    for turn in range(turns):
        for index in sorted(plans, reverse=turn % 2 == 1):
            trial = Trial(
                trial_run(run, plans[index], steps=WARM_UP + steps),
                environment,
                control=trials.requests,
                beacon=trials.beacon,
                on_point=lambda tokens, values: None,
            )
            trial.train_steps(trials.world_of(plans[index]), samples)
            times[index].append(fmean(trial.step_seconds[WARM_UP:]))
            trial.release_model()
            if environment.rank == 0:
                step_s = times[index][-1]
                print(f"turn {turn + 1}, plan {index + 1}: {1000 * step_s:.1f} ms", flush=True)
    if environment.rank == 0:
        (directory / "times.json").write_text(json.dumps(times))
    return 0


if __name__ == "__main__":
    leave(main(sys.argv[1:]))
