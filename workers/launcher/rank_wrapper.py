"""Wrapper of one rank, run by torchrun as a plain file: redirects output, records the exit status.

Standard library only and no project imports, so it adds only 20 ms to a rank.
"""

import contextlib
import ctypes
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path


def main() -> int:
    """Run the program; its exit code."""
    run_dir, command = Path(sys.argv[1]), sys.argv[3:]  # RUN_DIR -- PROGRAM ...
    _die_with_parent()
    folder = run_dir / f"rank-{os.environ['RANK']}"
    folder.mkdir(parents=True, exist_ok=True)
    for name, number in (("stdout.log", 1), ("stderr.log", 2)):
        file = os.open(folder / name, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        os.dup2(file, number)
        os.close(file)
    try:
        program = subprocess.Popen(command, preexec_fn=_die_with_parent)
    except OSError as error:
        print(f"{command[0]}: {error.strerror}", file=sys.stderr, flush=True)
        _write(folder / "status.json", {"code": 127, "time": time.time()})
        return 127
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGABRT, signal.SIGUSR1):
        signal.signal(number, lambda sent, frame: _forward(program, sent))
    _write(folder / "process.json", {"pid": program.pid, "time": time.time()})
    code = program.wait()
    _write(folder / "status.json", {"code": code, "time": time.time()})
    if code < 0:  # torchrun then names the signal, not a number
        signal.signal(-code, signal.SIG_DFL) if -code not in (
            signal.SIGKILL,
            signal.SIGSTOP,
        ) else None
        os.kill(os.getpid(), -code)
    return code


def _forward(program: "subprocess.Popen[bytes]", number: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        program.send_signal(number)


def _die_with_parent() -> None:
    if sys.platform.startswith("linux"):
        ctypes.CDLL(None).prctl(1, signal.SIGKILL, 0, 0, 0)  # PR_SET_PDEATHSIG


def _write(path: Path, data: dict[str, float]) -> None:
    # the supervisor reports a full disk
    with contextlib.suppress(OSError):
        temporary = path.with_name("." + path.name)
        temporary.write_text(json.dumps(data))
        os.replace(temporary, path)


if __name__ == "__main__":
    sys.exit(main())
