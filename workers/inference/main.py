"""The inference command: `python -m workers.inference.main --spec run.json [--dir DIR]`, for runs of kind generate.

Reads and refuses before it loads torch; how a run goes is `generate`'s.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from workers.contracts.exits import Outcome, UserError, write_exit
from workers.inference.accept import load_run
from workers.inference.exits import classify
from workers.inference.prompts import read_lines


def main(argv: Sequence[str] | None = None) -> int:
    """Returns the exit code: 0, 64 user error, 65 numerics, 66 out of memory, 67 asked to leave, 69 infrastructure."""
    options = _parser().parse_args(argv)
    directory = options.dir or Path("runs") / options.spec.stem
    try:
        run = load_run(options.spec)
        read_lines(Path(run.generate.input))  # a wrong line is told before anything heavy is loaded
        # huge pages for tensors of 2 MiB and more: what is gathered from the cache in each step
        os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")
        from workers.inference.generate import run_generate

        outcome = run_generate(run, directory)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return _left(classify(error), directory)
    except Exception as error:
        import traceback

        traceback.print_exc()
        return _left(classify(error), directory)
    print(outcome.reason, flush=True)
    return _left(outcome, directory)


def _left(outcome: Outcome, directory: Path) -> int:
    try:
        write_exit(directory, 0, outcome)
    except OSError as error:
        print(f"error: {directory} cannot be written: {error}", file=sys.stderr)
        return outcome.code or classify(error).code
    return outcome.code


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="workers.inference.main", description="Answer prompts as a run spec says.")
    parser.add_argument("--spec", type=Path, required=True, help="RunSpec as JSON")
    parser.add_argument("--dir", type=Path, help="run directory (default: runs/<name of the spec file>)")
    return parser


if __name__ == "__main__":
    sys.exit(main())
