"""A process that a reward asks: JSON lines to its standard input, replies on a pipe.

Does not depend on what it computes.
"""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

START_S = 120.0  # for imports


class RewardProcess:
    """Runs `program FD ARGUMENTS`, which replies `ready`, then once to each request.

    Methods return the reply and, if something went wrong, a sentence: the process has then ended,
    and the next request starts another one.
    """

    def __init__(self, program: Path, arguments: Sequence[str]) -> None:
        self.program, self.arguments = program, list(arguments)
        self._process: subprocess.Popen[bytes] | None = None
        self._read = -1
        self._buffer = b""

    def start(self) -> str:
        """Start it, if it does not run; what went wrong, or an empty string."""
        if self._process is not None:
            return ""
        self._read, write = os.pipe()
        self._buffer = b""
        self._process = subprocess.Popen(
            [sys.executable, "-u", str(self.program), str(write), *self.arguments],
            stdin=subprocess.PIPE,
            stdout=2,
            pass_fds=(write,),
            start_new_session=True,  # a terminal's Ctrl-C stops the run, which ends this process
        )
        os.close(write)
        ready, problem = self._receive(START_S)
        if not problem and ready != "ready":
            problem = str(ready)
        if problem:
            self.close()
        return problem

    def request(self, content: object, timeout_s: float) -> tuple[object, str]:
        """The reply to a request, within `timeout_s` seconds."""
        problem = self.start()
        if problem:
            return None, problem
        assert self._process is not None and self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(content).encode() + b"\n")
            self._process.stdin.flush()
        except OSError:
            self.close()
            return None, "ended its process"
        reply, problem = self._receive(timeout_s)
        if problem:
            self.close()
        return reply, problem

    def close(self) -> None:
        """End the process, and what it started."""
        process, self._process = self._process, None
        if process is None:
            return
        os.close(self._read)
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        if process.stdin is not None:
            with suppress(OSError):
                process.stdin.close()
        process.wait()

    def _receive(self, timeout_s: float) -> tuple[object, str]:
        until = time.monotonic() + timeout_s
        while b"\n" not in self._buffer:
            left = until - time.monotonic()
            if left <= 0 or not select.select([self._read], [], [], left)[0]:
                return None, f"gave no result within {timeout_s:g} s"
            part = os.read(self._read, 1 << 16)
            if not part:
                return None, "ended its process"
            self._buffer += part
        line, _, self._buffer = self._buffer.partition(b"\n")
        return json.loads(line), ""
