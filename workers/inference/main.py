"""The inference command, `python -m workers.inference.main --spec run.json [--dir DIR]`: generate,
serve, evaluate.

Reads and refuses before it loads torch; how a run goes is `generate`'s, `serve`'s and `evaluate`'s.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from workers.contracts.wire.exits import Outcome, UserError, write_exit
from workers.inference.env import read_surroundings
from workers.inference.evaluate.lines import read_items
from workers.inference.evaluate.metrics import read_metrics
from workers.inference.exits import classify
from workers.inference.generate.prompts import read_lines
from workers.inference.spec_loading import InferenceRun, load_run


def main(argv: Sequence[str] | None = None) -> int:
    """Returns the exit code: 0, 64 user error, 65 numerics, 66 out of memory, 67 asked to leave, 69
    infrastructure.
    """
    options = _parser().parse_args(argv)
    directory = options.dir or Path("runs") / options.spec.stem
    try:
        run = load_run(options.spec)
        _look(run)
        # huge pages for tensors of 2 MiB and more: what is gathered from the cache in each step
        os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")
        outcome = _go(run, directory, options)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return _left(classify(error), directory)
    except Exception as error:
        import traceback

        traceback.print_exc()
        return _left(classify(error), directory)
    print(outcome.reason, flush=True)
    return _left(outcome, directory)


def _look(run: InferenceRun) -> None:
    """A wrong line is told before anything heavy is loaded."""
    if run.spec.evaluate is not None:
        body = run.spec.evaluate
        read_items(body.input, body.references, run.spec.data, read_metrics(body.metrics))
    elif run.spec.generate is not None:
        read_lines(Path(run.generate.input))


def _go(run: InferenceRun, directory: Path, options: argparse.Namespace) -> Outcome:
    if run.spec.kind == "serve":
        from workers.inference.serve import run_serve

        return run_serve(run, read_surroundings(directory), host=options.host, port=options.port)
    if run.spec.kind == "evaluate":
        from workers.inference.evaluate.run import run_evaluate

        return run_evaluate(run, read_surroundings(directory))
    from workers.inference.generate.run import run_generate

    return run_generate(run, read_surroundings(directory))


def _left(outcome: Outcome, directory: Path) -> int:
    try:
        write_exit(directory, int(os.environ.get("RANK") or 0), outcome)
    except OSError as error:
        print(f"error: {directory} cannot be written: {error}", file=sys.stderr)
        return outcome.code or classify(error).code
    return outcome.code


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="workers.inference.main", description="Answer prompts as a run spec says."
    )
    parser.add_argument("--spec", type=Path, required=True, help="RunSpec as JSON")
    parser.add_argument(
        "--dir", type=Path, help="run directory (default: runs/<name of the spec file>)"
    )
    parser.add_argument(
        "--host",
        help="of kind serve: the address to listen on (default: ORRERY_ADDRESS, 127.0.0.1)",
    )
    parser.add_argument(
        "--port", type=int, default=0, help="of kind serve: the port (default: a free one)"
    )
    return parser


if __name__ == "__main__":
    sys.exit(main())
