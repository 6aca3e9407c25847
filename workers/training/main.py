"""The engine's command: `python -m workers.training.main --spec run.json [--dir DIR] [--print] [--fake-ranks N]`.

Under torchrun for more than one rank. Reads and refuses before it loads torch; how a run goes is `attempt`'s.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

from workers.training.accept import load_run
from workers.training.environment import check_world, read_environment
from workers.training.exits import Outcome, UserError, classify, write_exit


def main(argv: Sequence[str] | None = None) -> int:
    """Returns the exit code: 0, 64 user error, 65 numerics, 66 out of memory, 67 asked to leave, 69 infrastructure."""
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
            from workers.training.fake import describe_fake_ranks

            print(json.dumps(describe_fake_ranks(run, options.fake_ranks), indent=2))
            return 0
        check_world(run.plan, environment)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        outcome = classify(error, 0)
        if not options.print and options.fake_ranks is None:
            _try_write_exit(directory, outcome)
        return outcome.code
    # one thread a rank unless told otherwise: ranks share the cores; read when torch is loaded
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    # entries of torch's flight recorder: enough to compare ranks by, and read in 2 ms
    os.environ.setdefault("TORCH_FR_BUFFER_SIZE", "256")
    from workers.training.attempt import run_attempt

    return run_attempt(run, environment).code


def _try_write_exit(directory: Path, outcome: Outcome) -> None:
    try:
        rank = int(os.environ.get("RANK", 0))
        write_exit(directory, rank, outcome)
    except (OSError, ValueError) as error:
        print(f"error: {directory} cannot be written: {error}", file=sys.stderr)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="workers.training.main", description="Train a model as a run spec says.")
    parser.add_argument("--spec", type=Path, required=True, help="RunSpec as JSON")
    parser.add_argument("--dir", type=Path, help="run directory (default: runs/<name of the spec file>)")
    parser.add_argument("--resume", type=Path, help="a checkpoint folder; default: the newest of the run directory")
    parser.add_argument("--print", action="store_true", help="print the resolved spec and plan, then leave")
    parser.add_argument(
        "--fake-ranks", type=int, metavar="N", help="lay the model over N pretended ranks, print mesh and bytes, leave"
    )
    return parser


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    sys.stderr.flush()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)  # torchrun ends the others when it sees the first one gone
    # all is written and closed: an orderly interpreter shutdown of torch would only cost time
    os._exit(code)
