"""The command `python -m workers.training.trials.main --spec run.json --dir DIR`.

Under torchrun for more than one rank. `DIR/trials.json` has the plans. Rejects invalid specs
before it imports torch.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from workers.runtime.environment import check_world, read_environment
from workers.runtime.exit_codes import UserError
from workers.runtime.program import fast_import, leave, refuse, set_torch_defaults
from workers.training.setup.spec_loading import load_run
from workers.training.trials.state import read_order


def main(argv: Sequence[str] | None = None) -> int:
    """Returns the exit code, as `workers.training.main` does."""
    parser = argparse.ArgumentParser(
        prog="workers.training.trials.main", description="Measure candidate plans of a run."
    )
    parser.add_argument("--spec", type=Path, required=True, help="RunSpec as JSON")
    parser.add_argument("--dir", type=Path, required=True, help="folder with trials.json")
    options = parser.parse_args(argv)
    directory: Path = options.dir.absolute()
    try:
        environment = read_environment(directory)
        run = load_run(options.spec)
        order, began = read_order(directory)
        check_world(run.plan, environment)
    except UserError as error:
        return refuse(error, directory)
    set_torch_defaults()
    with fast_import():
        import torch._dynamo  # noqa: F401  (torch's optimizers import it when they are created)

        from workers.training.trials.runner import run_trials

    return run_trials(run, order, environment, began=began).code


if __name__ == "__main__":
    leave(main())
