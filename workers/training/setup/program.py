"""What the engine's commands share around a run: how they refuse, what they set before torch is
loaded, how they leave.

Knows the process and its exit file; does not know specs or torch.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import NoReturn

from workers.contracts.wire.exits import UserError, write_exit
from workers.training.setup.exits import classify


def refuse(error: UserError, directory: Path | None) -> int:
    """Tell a user error, and leave it as this rank's exit in `directory` where there is to be one.

    The exit code.
    """
    print(f"error: {error}", file=sys.stderr)
    outcome = classify(error, 0)
    if directory is not None:
        try:
            write_exit(directory, int(os.environ.get("RANK", 0)), outcome)
        except (OSError, ValueError) as broken:
            print(f"error: {directory} cannot be written: {broken}", file=sys.stderr)
    return outcome.code


def set_torch_defaults() -> None:
    """Environment that torch reads when it is loaded; what is set already stays."""
    # one thread a rank unless told otherwise: ranks share the cores
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    # huge pages for tensors of 2 MiB and more: logits of 131 MB take 9 ms to get from the system,
    # not 58
    os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")
    # entries of torch's flight recorder: enough to compare ranks by, and read in 2 ms
    os.environ.setdefault("TORCH_FR_BUFFER_SIZE", "256")


def leave(code: int) -> NoReturn:
    """End the process at once: all is written and closed, an orderly shutdown of torch would only
    cost time.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    for number in (signal.SIGTERM, signal.SIGINT):
        # torchrun ends the others when it sees the first one gone
        signal.signal(number, signal.SIG_IGN)
    os._exit(code)
