"""Runs the same tests again and again, for mutation.py: each time in a fork, on a changed module.

Reads one empty line per run from stdin and answers `killed` or `survived`; the output of the last
run is in mutation.log.
"""

from __future__ import annotations

import atexit
import importlib
import os
import signal
import sys
import time

PYTEST = ["-x", "-q", "-p", "no:randomly", "-p", "no:xdist", "-p", "no:cacheprovider"]
PYTEST += ["--hypothesis-seed=0", "--hypothesis-profile=mutation"]
PYTEST += ["-W", "ignore::pytest.PytestAssertRewriteWarning"]
# imported before the fork, to save time
LIBRARIES = ["pytest", "hypothesis", "numpy", "pydantic", "redis", "celery", "django.db.models"]


def main(tests: list[str]) -> None:
    """Run the tests in a fork for each line of stdin, with the libraries already imported."""
    sys.path[0] = os.getcwd()
    import hypothesis

    for name in LIBRARIES:
        importlib.import_module(name)
    phases = [
        hypothesis.Phase.explicit,
        hypothesis.Phase.generate,
    ]  # a failing example is not shrunk
    hypothesis.settings.register_profile("mutation", deadline=None, phases=phases)
    start = time.monotonic()
    passed = run_forked(tests, 600)
    print("ready" if passed else "failed", flush=True)
    limit = 20 + 5 * (time.monotonic() - start)
    sys.dont_write_bytecode = True
    for _ in sys.stdin:
        print("survived" if run_forked(tests, limit) else "killed", flush=True)


def run_forked(tests: list[str], limit_s: float) -> bool:
    """Whether the tests pass in time, in a forked process."""
    child = os.fork()
    if child == 0:
        os.setsid()
        log = os.open("mutation.log", os.O_CREAT | os.O_WRONLY | os.O_TRUNC)
        for number in (1, 2):
            os.dup2(log, number)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        code = importlib.import_module("pytest").main([*PYTEST, *tests])
        atexit._run_exitfuncs()
        os._exit(int(code))
    end = time.monotonic() + limit_s
    while time.monotonic() < end:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            return status == 0
        time.sleep(0.05)
    os.killpg(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return False


if __name__ == "__main__":
    main(sys.argv[1:])
