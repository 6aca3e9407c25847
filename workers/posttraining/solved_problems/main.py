"""The command `python -m workers.posttraining.solved_problems.main [--dir DIR] [--steps N]`.

Trains for about a minute on one core and writes each step's numbers as points, which the page
"Reinforcement learning on solved problems" draws next to the exact answers. Runs on one rank.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from workers.contracts.catalog import solved_problems as problems
from workers.metrics.recorder import Recorder
from workers.runtime.environment import read_environment
from workers.runtime.exit_codes import UserError
from workers.runtime.program import refuse, set_torch_defaults


def main(argv: Sequence[str] | None = None) -> int:
    """The exit code: 0, or 64 for a user error."""
    parser = argparse.ArgumentParser(
        prog="workers.posttraining.solved_problems.main",
        description="Train on a walk and a bandit whose exact answers are known.",
    )
    parser.add_argument("--dir", type=Path, help="run directory (default: runs/solved-problems)")
    parser.add_argument("--steps", type=int, default=problems.STEPS)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--seconds", type=float, default=problems.SECONDS, help="spread the steps over this time"
    )
    options = parser.parse_args(argv)
    launched = os.environ.get("ORRERY_RUN_DIR")
    directory = options.dir or Path(launched or f"runs/{problems.TAG}")
    try:
        environment = read_environment(directory)
        if environment.world_size != 1:
            raise UserError(
                f"resources.devices: {environment.world_size} ranks would each train alone. "
                "Use devices 1."
            )
        if options.steps < 1:
            raise UserError(
                f"--steps: {options.steps} is not a positive integer. Use --steps {problems.STEPS}."
            )
    except UserError as error:
        return refuse(error, directory)
    set_torch_defaults()
    from workers.posttraining.solved_problems.training import train

    recorder = Recorder(
        environment.rank_directory,
        run=environment.run,
        attempt=environment.attempt or 1,
        rank=environment.rank,
    )
    try:
        train(recorder, steps=options.steps, seed=options.seed, seconds=options.seconds)
    finally:
        recorder.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
