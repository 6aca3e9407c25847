"""`python -m kernels.gpu --budget-s N --out DIR`: checks and measures on this machine's GPU.

Exits with 1 only if a result is wrong; slow and skipped cases are listed in the rows.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import torch

from kernels import runtime


def main() -> int:
    """Runs the command; returns 0, 1 if a result is wrong, or 2 without a GPU."""
    parser = argparse.ArgumentParser(
        prog="python -m kernels.gpu", description="Checks and measures kernels on a GPU."
    )
    parser.add_argument(
        "--budget-s", type=float, default=480.0, help="stop after this many seconds (480)"
    )
    parser.add_argument(
        "--out", type=Path, default=Path("docs/results"), help="directory of the rows"
    )
    parser.add_argument("--only", metavar="OP", help="one operation")
    parser.add_argument(
        "--processes",
        type=int,
        help="processes that check and compile at a time (default: by the number of cores)",
    )
    args = parser.parse_args()
    if runtime.INTERPRET:
        parser.error("TRITON_INTERPRET is set, so nothing would run on the GPU: unset it.")
    if not torch.cuda.is_available() or torch.version.cuda is None:
        parser.error(
            "torch sees no NVIDIA GPU here; run this where nvidia-smi lists one, with a CUDA "
            "build of torch."
        )
    from kernels.gpu.session import run
    from kernels.gpu.worker_pool import NoWorker

    try:
        path, failed = run(args.out, args.budget_s, args.only, max_processes=args.processes)
    except NoWorker as error:
        parser.error(str(error))
    print(f"rows: {path}")
    for message in failed:
        print(f"wrong: {message}", file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
