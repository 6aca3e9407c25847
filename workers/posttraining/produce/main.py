"""The command `python -m workers.posttraining.produce.main --spec run.json [--dir DIR]`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from workers.posttraining.produce.run import run_produce
from workers.runtime.environment import read_environment
from workers.runtime.exit_codes import UserError, classify
from workers.runtime.program import record_exit, refuse
from workers.runtime.spec_loading import parse_spec, read_document


def main(argv: Sequence[str] | None = None) -> int:
    """The exit code: 0, 64 user error, 67 stopped, 69 infrastructure."""
    parser = argparse.ArgumentParser(prog="workers.posttraining.produce.main", description=__doc__)
    parser.add_argument("--spec", type=Path, required=True, help="RunSpec as JSON")
    parser.add_argument("--dir", type=Path, help="run directory (default: runs/<spec's name>)")
    options = parser.parse_args(argv)
    directory = options.dir or Path("runs") / options.spec.stem
    try:
        spec = parse_spec(read_document(options.spec, "produce"))
        if spec.produce is None:
            raise UserError(f"kind: this program runs kind produce, this is {spec.kind}")
        outcome = run_produce(spec.produce, read_environment(directory))
    except UserError as error:
        return refuse(error, directory)
    except Exception as error:
        outcome = classify(error)
        print(f"error: {outcome.reason}", file=sys.stderr)
        return record_exit(outcome, directory)
    print(outcome.reason, flush=True)
    return record_exit(outcome, directory)


if __name__ == "__main__":
    sys.exit(main())
