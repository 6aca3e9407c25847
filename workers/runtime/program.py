"""Start and end of an engine command: report a UserError, load torch, exit.

Does not depend on specs or torch.
"""

from __future__ import annotations

import contextlib
import gc
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NoReturn

from workers.runtime.exit_codes import Outcome, UserError, classify, write_exit


def refuse(error: UserError, directory: Path | None) -> int:
    """Print a user error, write it as this rank's exit if `directory` is set; the exit code."""
    print(f"error: {error}", file=sys.stderr)
    outcome = classify(error)
    return outcome.code if directory is None else record_exit(outcome, directory)


def record_exit(outcome: Outcome, directory: Path) -> int:
    """Write this rank's exit file; the exit code, also if the file cannot be written."""
    try:
        write_exit(directory, int(os.environ.get("RANK") or 0), outcome)
    except (OSError, ValueError) as error:
        print(f"error: {directory} cannot be written: {error}", file=sys.stderr)
        return outcome.code or classify(error).code
    return outcome.code


def set_torch_defaults() -> None:
    """Set variables that torch reads when it loads, unless they are set."""
    # one thread per rank by default: ranks share the cores
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    use_huge_pages()
    # entries of torch's flight recorder: enough to compare ranks, read in 2 ms
    os.environ.setdefault("TORCH_FR_BUFFER_SIZE", "256")


def use_huge_pages() -> None:
    """Huge pages for tensors of 2 MiB and more: 131 MB of logits are allocated in 9 ms, not 58."""
    os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")


@contextlib.contextmanager
def fast_import() -> Iterator[None]:
    """Import modules without garbage collection, and exclude them from it afterwards.

    torch creates 500,000 objects that stay: searching them took 20% of the CPU time of a start.
    """
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


def leave(code: int) -> NoReturn:
    """Exit at once: everything is written, and an orderly shutdown of torch only costs time."""
    sys.stdout.flush()
    sys.stderr.flush()
    for number in (signal.SIGTERM, signal.SIGINT):
        # torchrun stops the other ranks when the first one exits
        signal.signal(number, signal.SIG_IGN)
    os._exit(code)
