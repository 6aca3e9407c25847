"""The command `python -m workers.training.benchmark.main --spec run.json [--dir DIR] [--print]`.

Under torchrun for more than one rank. Rejects invalid specs before it imports torch.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path

from workers.runtime.environment import check_world, read_environment
from workers.runtime.exit_codes import UserError
from workers.runtime.program import fast_import, leave, refuse, set_torch_defaults
from workers.training.benchmark.accept import load_benchmark


def main(argv: Sequence[str] | None = None) -> int:
    """Returns the exit code, as `workers.training.main` does."""
    parser = argparse.ArgumentParser(
        prog="workers.training.benchmark.main", description="Measure variants of a plan."
    )
    parser.add_argument(
        "--spec", type=Path, required=True, help="RunSpec of kind benchmark as JSON"
    )
    parser.add_argument(
        "--dir", type=Path, help="run directory (default: runs/<name of the spec file>)"
    )
    parser.add_argument(
        "--print", action="store_true", help="print the variants and the skipped ones, then exit"
    )
    options = parser.parse_args(argv)
    directory = options.dir or Path("runs") / options.spec.stem
    try:
        environment = read_environment(directory)
        run = load_benchmark(options.spec)
        if options.print:
            print(json.dumps(run.describe(), indent=2))
            return 0
        check_world(run.base.plan, environment)
    except UserError as error:
        return refuse(error, None if options.print else directory)
    set_torch_defaults()
    with fast_import():
        from workers.training.benchmark.runner import run_benchmark

    return run_benchmark(run, environment).code


if __name__ == "__main__":
    leave(main())
