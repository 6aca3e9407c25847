"""Unit tests as reward: an answer's Python code against the line's assertions, in a sandbox.

Each answer has a process of its own (`sandbox_process`) without network, processes or changes of
files, in an empty folder, with limits of time and memory. Does not depend on models.
"""

from __future__ import annotations

import json
import os
import re
import secrets
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

from workers.contracts.specs.finetuning.rewards import TestsReward
from workers.posttraining.reinforcement.rewards.reward import AnswerToScore, Reward, Score
from workers.runtime.exit_codes import UserError

_PROGRAM = Path(__file__).with_name("sandbox_process.py")
_MEMORY_BYTES = 1 << 30  # of address space
_PROCESSES = 8  # at a time, at most
_START_S = 10.0  # for the interpreter, on a busy machine
_FENCE = re.compile(r"```[ \t]*(?:python|py)?[ \t]*\n(.*?)(?:```|\Z)", re.DOTALL | re.IGNORECASE)


class UnitTestReward(Reward):
    """1 if the code runs and all assertions hold, 0 if not.

    An attempt at the network, other processes or files is a failure, not a score.
    """

    def __init__(self, spec: TestsReward, name: str) -> None:
        """Raises UserError if this machine has no sandbox."""
        super().__init__(name, spec.weight)
        self.spec = spec
        self._pool = ThreadPoolExecutor(min(_PROCESSES, os.cpu_count() or 1))
        try:
            self._check()
        except UserError:
            self.close()
            raise

    def score(self, answers: Sequence[AnswerToScore]) -> list[Score]:
        """One process per answer."""
        return list(self._pool.map(self._score, answers))

    def close(self) -> None:
        """Wait for the processes, each of which ends within its limit."""
        self._pool.shutdown(cancel_futures=True)

    def _check(self) -> None:
        outcome = self._run("", "assert True")
        if "passed" not in outcome:
            reason = outcome.get("unavailable") or outcome.get("ended") or "it does not start"
            raise UserError(
                f"{self.name}: this node has no sandbox for tests: {reason}. "
                "Use Linux on x86_64 or aarch64 whose containers allow seccomp filters."
            )

    def _score(self, answer: AnswerToScore) -> Score:
        outcome = self._run(code_of(answer.text), answer.expected or "")
        if "forbidden" in outcome:
            return Score(failure=f"the code tried {outcome['forbidden']} and was stopped")
        if "unavailable" in outcome:
            return Score(failure=f"no sandbox: {outcome['unavailable']}")
        return Score(float("passed" in outcome))

    def _run(self, code: str, tests: str) -> dict[str, str]:
        """What the process reported; `ended` if it ended without a report."""
        token = secrets.token_hex(16)
        request = json.dumps({"code": code, "tests": tests, "token": token}).encode()
        read, write = os.pipe()
        try:
            with tempfile.TemporaryDirectory(prefix="tests-", ignore_cleanup_errors=True) as folder:
                os.chmod(folder, 0o755)
                ended = self._execute(request, write, folder)
            os.set_blocking(read, False)
            with suppress(BlockingIOError):
                return _outcome(os.read(read, 1 << 16), token, ended)
            return _outcome(b"", token, ended)
        finally:
            os.close(read)
            with suppress(OSError):
                os.close(write)

    def _execute(self, request: bytes, write: int, folder: str) -> str:
        """Run the process to its end; why it ended, as text."""
        limits = [str(write), str(self.spec.timeout_s), str(_MEMORY_BYTES)]
        process = subprocess.Popen(
            [sys.executable, "-I", "-S", str(_PROGRAM), *limits],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            pass_fds=(write,),
            cwd=folder,
            env={},
            start_new_session=True,
        )
        try:
            process.communicate(request, timeout=_START_S + self.spec.timeout_s)
        except subprocess.TimeoutExpired:
            return "timeout"
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        return {-signal.SIGSYS: "forbidden", -signal.SIGXCPU: "timeout"}.get(
            process.returncode, f"exit status {process.returncode}"
        )


def code_of(text: str) -> str:
    """The last fenced block of an answer, else all of it."""
    blocks = _FENCE.findall(text)
    return str(blocks[-1]) if blocks else text


def _outcome(reported: bytes, token: str, ended: str) -> dict[str, str]:
    line = reported.partition(b"\n")[0]
    with suppress(ValueError):
        outcome = json.loads(line)
        if isinstance(outcome, dict) and outcome.get("passed", token) == token:
            return {str(name): str(value) for name, value in outcome.items()}
    if ended == "forbidden":
        return {"forbidden": "a system call that the sandbox forbids"}
    return {"ended": ended}
