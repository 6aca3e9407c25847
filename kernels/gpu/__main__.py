"""`python -m kernels.gpu --budget-s N --out DIR`: checks and measures on this machine's GPU.

Exit 1 only when a result is wrong; what is slow or left out stands in the rows.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from pathlib import Path

import torch

from kernels import runtime


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m kernels.gpu", description="Checks and measures kernels on a GPU.")
    parser.add_argument("--budget-s", type=float, default=480.0, help="stop after so many seconds (480)")
    parser.add_argument("--out", type=Path, default=Path("docs/results"), help="directory of the rows")
    parser.add_argument("--only", metavar="OP", help="one operation")
    parser.add_argument("--go-on", type=Path, metavar="ROWS", help="rows of a run that a fault ended: go on behind it")
    asked = parser.parse_args()
    started = time.monotonic()
    if runtime.INTERPRET:
        parser.error("TRITON_INTERPRET is set, so nothing would run on the GPU: unset it.")
    if not torch.cuda.is_available() or torch.version.cuda is None:
        parser.error("torch sees no NVIDIA GPU here; run this where nvidia-smi lists one, with a CUDA build of torch.")
    from kernels.gpu.run import Dead, run

    try:
        path, failed = run(asked.out, asked.budget_s, asked.only, asked.go_on)
    except Dead as dead:
        left_s = asked.budget_s - (time.monotonic() - started)
        print("The GPU stopped answering this process; a new one goes on.", file=sys.stderr, flush=True)
        again = ["--budget-s", f"{left_s:.0f}", "--out", str(asked.out), "--go-on", str(dead)]
        only = ["--only", asked.only] if asked.only else []
        os.execv(sys.executable, [sys.executable, "-m", "kernels.gpu", *again, *only])
    print(f"rows: {path}")
    for sentence in failed:
        print(f"wrong: {sentence}", file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
