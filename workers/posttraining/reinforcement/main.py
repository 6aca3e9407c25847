"""The command of policy optimization:
`python -m workers.posttraining.reinforcement.main --spec run.json [--dir DIR]`.

Run it under torchrun for more than one rank. Validates the spec before it loads torch.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from workers.runtime.environment import check_world, read_environment
from workers.runtime.exit_codes import UserError
from workers.runtime.program import fast_import, leave, refuse, set_torch_defaults
from workers.training.setup.spec_loading import load_run


def main(argv: Sequence[str] | None = None) -> int:
    """Train by the spec; the exit code, as that of `workers.training.main`."""
    parser = argparse.ArgumentParser(
        prog="workers.posttraining.reinforcement.main", description="Train by sampled answers."
    )
    parser.add_argument("--spec", type=Path, required=True, help="RunSpec as JSON")
    parser.add_argument("--dir", type=Path, help="run directory (default: runs/<spec's name>)")
    parser.add_argument("--resume", type=Path, help="a checkpoint folder")
    options = parser.parse_args(argv)
    directory = options.dir or Path("runs") / options.spec.stem
    try:
        environment = read_environment(directory, resume=options.resume)
        run = load_run(options.spec)
        if run.train.policy is None:
            raise UserError(
                f"train.objective: this program trains by grpo or ppo, the spec says "
                f"{run.train.objective}. Use workers.training.main."
            )
        if run.train.policy.rollout.splits_devices:
            raise UserError(
                f"train.{run.train.objective}.rollout.devices: auto is resolved at submission, "
                "this program needs a number. Use devices 1."
            )
        rollout_ranks = run.train.policy.rollout.separate_devices
        check_world(run.plan, environment, more=rollout_ranks)
    except UserError as error:
        return refuse(error, directory)
    set_torch_defaults()
    with fast_import():
        import torch._dynamo  # noqa: F401  (torch's optimizers import it when they are created)

        from workers.posttraining.reinforcement.roles import run_rank

    return run_rank(run, environment).code


if __name__ == "__main__":
    leave(main())
