"""Unit tests as reward: code runs in a sandbox that limits time, memory, network and files."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import pytest

from tests.workers.posttraining.test_policy_losses import options_of
from workers.posttraining.reinforcement.rewards import sandbox_process, unit_tests
from workers.posttraining.reinforcement.rewards.build import build_rewards
from workers.posttraining.reinforcement.rewards.reward import AnswerToScore
from workers.runtime.exit_codes import UserError

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the sandbox needs seccomp")
DOUBLE = "def double(x):\n    return 2 * x\n"
TESTS = "assert double(2) == 4\nassert double(-1) == -2"


@pytest.fixture(scope="module")
def reward():
    [built] = build_rewards(options_of(rewards=[{"kind": "tests", "timeout_s": 1}]))
    yield built
    built.close()


def scored(reward, *codes, tests=TESTS):
    answers = [AnswerToScore("Write double.", code, tests, "tasks.jsonl: line 7") for code in codes]
    return [each.failure or each.value for each in reward.score(answers)]


def test_code_that_passes_has_one_and_other_code_zero(reward):
    fenced = f"Here it is:\n```python\n{DOUBLE}```\nDone."
    wrong = ["def double(x):\n    return x", "def double(x", "", "import absent_module", "1/0"]
    assert scored(reward, DOUBLE, fenced, *wrong) == [1, 1, 0, 0, 0, 0, 0]


def test_the_standard_library_and_threads_work(reward):
    code = f"""
import bisect, collections, dataclasses, functools, heapq, itertools, json, math, random, re
import statistics, string, threading, typing
ran = []
thread = threading.Thread(target=lambda: ran.append(1))
thread.start(); thread.join()
assert ran and math.gcd(4, 6) == 2
{DOUBLE}"""
    assert scored(reward, code) == [1]


@pytest.mark.parametrize(
    "code",
    ["import sys; sys.exit(0)", "import os; os._exit(0)", "raise SystemExit", "quit()"],
)
def test_leaving_early_passes_no_test(reward, code):
    assert scored(reward, code) == [0]


def test_slow_code_is_stopped(reward):
    began = time.monotonic()
    assert scored(reward, "while True: pass", "import time; time.sleep(600)") == [0, 0]
    assert time.monotonic() - began < 60


def test_memory_is_limited(reward):
    assert scored(reward, "x = bytearray(1 << 31)", "x = [0]\nwhile True: x += x") == [0, 0]


@pytest.mark.parametrize(
    ("code", "what"),
    [
        ("import socket; socket.socket()", "the network"),
        ("import urllib.request as r; r.urlopen('http://127.0.0.1:9')", "the network"),
        ("import os; os.fork()", "another process"),
        ("import os; os.system('true')", "another process"),
        ("import subprocess; subprocess.run(['true'])", "another process"),
        ("open('out.txt', 'w')", "the disk (write"),
        ("open('/etc/passwd').read()", "the disk (read"),
        ("import os; os.listdir('/')", "the disk"),
        ("import os; os.remove('x')", "the disk"),
        ("import tempfile; tempfile.mkdtemp()", "the disk"),
        ("import ctypes; ctypes.CDLL(None)", "native code"),
        ("try:\n    open('x', 'a')\nexcept BaseException:\n    pass\n" + DOUBLE, "the disk (write"),
    ],
)
def test_attempts_are_stopped_and_named(reward, code, what):
    [failure] = scored(reward, code)
    assert isinstance(failure, str) and what in failure and "stopped" in failure, failure


def test_a_test_of_the_line_is_in_the_same_sandbox(reward):
    [failure] = scored(reward, DOUBLE, tests="import socket\nsocket.create_connection(('::1', 9))")
    assert "the network" in failure


@pytest.mark.parametrize(
    "attempt",
    [
        "socket.socket()",
        "os.fork()",
        "os.execv('/bin/true', ['true'])",
        "os.open('/tmp/x', os.O_CREAT | os.O_WRONLY)",
        "os.mkdir('/tmp/sandbox-folder')",
        "os.unlink('/tmp/x')",
    ],
)
def test_the_kernel_stops_what_no_audit_event_names(reward, tmp_path, monkeypatch, attempt):
    """Without the audit hook, as for code that disables it."""
    text = Path(sandbox_process.__file__).read_text().replace("    watch(report)\n", "", 1)
    program = tmp_path / "program.py"
    program.write_text(text)
    monkeypatch.setattr(unit_tests, "_PROGRAM", program)
    for folder in (tmp_path, *tmp_path.parents):
        if not os.access(folder, os.X_OK):
            pytest.skip("the folder cannot be entered")
    [failure] = scored(reward, f"import os, socket\n{attempt}\n{DOUBLE}")
    assert isinstance(failure, str) and "system call" in failure, failure


def test_a_failure_names_the_prompt(reward):
    from workers.posttraining.reinforcement.rewards.build import score_rollouts
    from workers.posttraining.reinforcement.rollouts import Rollout

    rollout = Rollout(1, 0, 0, [1], [2], [0.0], 0, "Write.", "open('x', 'w')", TESTS)
    score_rollouts([reward], [rollout], ["tasks.jsonl: line 7"])
    assert "tests: the code tried the disk" in rollout.failure
    assert "tasks.jsonl: line 7" in rollout.failure


def test_a_node_without_sandbox_refuses_the_run(tmp_path, monkeypatch):
    program = tmp_path / "program.py"
    text = Path(sandbox_process.__file__).read_text()
    program.write_text(text.replace("machine = os.uname().machine", 'machine = "none"', 1))
    monkeypatch.setattr(unit_tests, "_PROGRAM", program)
    with pytest.raises(UserError, match="has no sandbox for tests: no filter of system calls"):
        build_rewards(options_of(rewards=[{"kind": "tests"}]))
