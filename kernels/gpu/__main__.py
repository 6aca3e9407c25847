"""`python -m kernels.gpu --budget-s N --out DIR`: checks and measures on this machine's GPU.

Exit 1 only when a result is wrong; what is slow or left out stands in the rows.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import torch

from kernels import runtime


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m kernels.gpu", description="Checks and measures kernels on a GPU."
    )
    parser.add_argument(
        "--budget-s", type=float, default=480.0, help="stop after so many seconds (480)"
    )
    parser.add_argument(
        "--out", type=Path, default=Path("docs/results"), help="directory of the rows"
    )
    parser.add_argument("--only", metavar="OP", help="one operation")
    parser.add_argument(
        "--processes", type=int, help="how many check and compile at a time (by the cores)"
    )
    asked = parser.parse_args()
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
        path, failed = run(asked.out, asked.budget_s, asked.only, most=asked.processes)
    except NoWorker as error:
        parser.error(str(error))
    print(f"rows: {path}")
    for sentence in failed:
        print(f"wrong: {sentence}", file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
