"""Replaces torchrun: starts the local ranks and ends all of them if one fails.

Runs `fake_rank.py` in place of the engine's program. Standard library only.
"""

import argparse
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

FAKE_RANK = Path(__file__).resolve().parents[3] / "fake_rank.py"


def main() -> int:
    """Run the ranks; 0 if all exit with 0, else 1."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--nnodes", type=int)
    parser.add_argument("--node-rank", type=int)
    parser.add_argument("--nproc-per-node", type=int)
    parser.add_argument("--no-python", action="store_true")
    options, rest = parser.parse_known_args()
    # the second is release 0.1's
    wrappers = ("rank_wrapper.py", "launcher/rank.py")
    start = next(i for i, word in enumerate(rest) if word.endswith(wrappers))
    wrapper, run_dir, program = rest[start], rest[start + 1], rest[start + 3 :]
    options_of_program = program[program.index("--spec") :]
    command = [sys.executable, "-S", "-E", wrapper, run_dir, "--"]
    command += [sys.executable, "-S", "-E", str(FAKE_RANK), *options_of_program]
    local = options.nproc_per_node
    ranks = []
    for local_rank in range(local):
        environ = {
            **os.environ,
            "RANK": str(options.node_rank * local + local_rank),
            "LOCAL_RANK": str(local_rank),
            "WORLD_SIZE": str(options.nnodes * local),
        }
        ranks.append(subprocess.Popen(command, env=environ))

    def forward(number: int, frame: object) -> None:
        for rank in ranks:
            if rank.poll() is None:
                rank.send_signal(number)

    signal.signal(signal.SIGTERM, forward)
    while True:
        codes = [rank.poll() for rank in ranks]
        if all(code == 0 for code in codes):
            return 0
        if any(code not in (None, 0) for code in codes):
            break
        time.sleep(0.05)
    forward(signal.SIGTERM, None)
    deadline = time.monotonic() + 2.0
    while time.monotonic() < deadline and any(rank.poll() is None for rank in ranks):
        time.sleep(0.05)
    for rank in ranks:
        if rank.poll() is None:
            rank.kill()
        rank.wait()
    return 1


if __name__ == "__main__":
    sys.exit(main())
