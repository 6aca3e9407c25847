"""The engine's command: `python -m workers.training.main --spec run.json [--dir DIR] [--print]
[--fake-ranks N]`.

Run it under torchrun for more than one rank. Validates the spec before it loads torch; `attempt`
runs it.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path

from workers.runtime.environment import check_world, read_environment
from workers.runtime.exit_codes import UserError
from workers.runtime.program import fast_import, leave, refuse, set_torch_defaults
from workers.training.setup.spec_loading import load_run


def main(argv: Sequence[str] | None = None) -> int:
    """Returns the exit code: 0 ok, 64 user error, 65 numerics, 66 out of memory, 67 left on
    request, 69 infrastructure.
    """
    options = _parser().parse_args(argv)
    directory = options.dir or Path("runs") / options.spec.stem
    try:
        environment = read_environment(directory, resume=options.resume)
        run = load_run(options.spec)
        if options.print:
            if environment.rank == 0:
                print(json.dumps(run.describe(), indent=2))
            return 0
        if options.fake_ranks is not None:
            from workers.training.setup.fake_ranks import describe_fake_ranks

            print(json.dumps(describe_fake_ranks(run, options.fake_ranks), indent=2))
            return 0
        if run.train.policy is not None:
            raise UserError(
                f"train.objective: this program trains on given samples, {run.train.objective} "
                "samples answers. Use workers.posttraining.reinforcement.main."
            )
        check_world(run.plan, environment)
    except UserError as error:
        return refuse(error, None if options.print or options.fake_ranks is not None else directory)
    set_torch_defaults()
    with fast_import():
        import torch._dynamo  # noqa: F401  (torch's optimizers import it when they are created)

        from workers.training.setup.attempt import run_attempt

    return run_attempt(run, environment).code


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="workers.training.main", description="Train a model by a run spec."
    )
    parser.add_argument("--spec", type=Path, required=True, help="RunSpec as JSON")
    parser.add_argument(
        "--dir", type=Path, help="run directory (default: runs/<name of the spec file>)"
    )
    parser.add_argument(
        "--resume", type=Path, help="a checkpoint folder; default: the newest of the run directory"
    )
    parser.add_argument(
        "--print", action="store_true", help="print the resolved spec and plan, then exit"
    )
    parser.add_argument(
        "--fake-ranks",
        type=int,
        metavar="N",
        help="shard the model over N fake ranks, print mesh and bytes, exit",
    )
    return parser


if __name__ == "__main__":
    leave(main())
