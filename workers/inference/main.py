"""The inference command: `python -m workers.inference.main --spec run.json [--dir DIR]`.

Runs kinds generate, serve and evaluate. Validates the spec before it loads torch.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from workers.inference.evaluate.lines import read_items
from workers.inference.evaluate.metrics import read_metrics
from workers.inference.generate.prompts import read_prompts
from workers.inference.spec_loading import InferenceRun, load_run
from workers.runtime.environment import read_environment
from workers.runtime.exit_codes import Outcome, UserError, classify
from workers.runtime.program import fast_import, record_exit, refuse, use_huge_pages


def main(argv: Sequence[str] | None = None) -> int:
    """The exit code: 0, 64 user error, 65 numerics, 66 out of memory, 67 stopped, 69
    infrastructure.
    """
    options = _parser().parse_args(argv)
    directory = options.dir or Path("runs") / options.spec.stem
    try:
        run = load_run(options.spec)
        _check_input(run)
        use_huge_pages()
        outcome = _execute(run, directory, options)
    except UserError as error:
        return refuse(error, directory)
    except Exception as error:
        import traceback

        traceback.print_exc()
        return record_exit(classify(error), directory)
    print(outcome.reason, flush=True)
    return record_exit(outcome, directory)


def _check_input(run: InferenceRun) -> None:
    """Report a wrong input line before torch loads."""
    if run.spec.evaluate is not None:
        body = run.spec.evaluate
        read_items(body.input, body.references, run.spec.data, read_metrics(body.metrics))
    elif run.spec.generate is not None:
        read_prompts(Path(run.generate.input))


def _execute(run: InferenceRun, directory: Path, options: argparse.Namespace) -> Outcome:
    environment = read_environment(directory)
    if run.spec.kind == "serve":
        with fast_import():
            from workers.inference.serve import run_serve

        return run_serve(run, environment, host=options.host, port=options.port)
    if run.spec.kind == "evaluate":
        with fast_import():
            from workers.inference.evaluate.run import run_evaluate

        return run_evaluate(run, environment)
    with fast_import():
        from workers.inference.generate.run import run_generate

    return run_generate(run, environment)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="workers.inference.main", description="Generate, serve or evaluate by a run spec."
    )
    parser.add_argument("--spec", type=Path, required=True, help="RunSpec as JSON")
    parser.add_argument(
        "--dir", type=Path, help="run directory (default: runs/<name of the spec file>)"
    )
    parser.add_argument(
        "--host",
        help="kind serve: the address to listen on (default: ORRERY_ADDRESS, 127.0.0.1)",
    )
    parser.add_argument(
        "--port", type=int, default=0, help="kind serve: the port (default: a free one)"
    )
    return parser


if __name__ == "__main__":
    sys.exit(main())
