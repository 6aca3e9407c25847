"""The benchmark's command: `python -m workers.training.benchmark.main --spec run.json [--dir DIR] [--print]`.

Under torchrun for more than one rank. Reads and refuses before it loads torch; how turns follow each other is `turns`'.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

from workers.training.benchmark.accept import load_benchmark
from workers.training.environment import check_world, read_environment
from workers.training.exits import UserError, classify, write_exit


def main(argv: Sequence[str] | None = None) -> int:
    """Returns the exit code, as `workers.training.main` does."""
    parser = argparse.ArgumentParser(prog="workers.training.benchmark.main", description="Measure variants of a plan.")
    parser.add_argument("--spec", type=Path, required=True, help="RunSpec of kind benchmark as JSON")
    parser.add_argument("--dir", type=Path, help="run directory (default: runs/<name of the spec file>)")
    parser.add_argument("--print", action="store_true", help="print the variants and what is left out, then leave")
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
        print(f"error: {error}", file=sys.stderr)
        outcome = classify(error, 0)
        if not options.print:
            try:
                write_exit(directory, int(os.environ.get("RANK", 0)), outcome)
            except (OSError, ValueError) as broken:
                print(f"error: {directory} cannot be written: {broken}", file=sys.stderr)
        return outcome.code
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # ranks share the cores; read when torch is loaded
    os.environ.setdefault("TORCH_FR_BUFFER_SIZE", "256")
    from workers.training.benchmark.turns import run_benchmark

    return run_benchmark(run, environment).code


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    sys.stderr.flush()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)  # torchrun ends the others when it sees the first one gone
    os._exit(code)  # as training does: all is written, an orderly shutdown of torch would only cost time
