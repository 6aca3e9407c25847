"""Mutation testing of five modules: changes one operator at a time and runs the module's tests.

`make test-mutation ARGS="--only policy --budget-s 600"`. cosmic-ray makes the mutants, in an
environment of its own (.venv-mutation); the tests run with .venv, in copies of the working tree.
Exits 1 if a mutant survives that tests/mutation_equivalents.toml does not list.
"""

from __future__ import annotations

import argparse
import os
import random
import shutil
import subprocess
import sys
import tempfile
import threading
import time
import tomllib
import venv
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
PYTHON, ENVIRONMENT = str(ROOT / ".venv/bin/python"), ROOT / ".venv-mutation"
TESTS = "tests/orchestrator"
# their tests need neither Django nor fixtures, which take longer to load than the tests to run
PURE = {"policy", "envelope", "legality"}
WITHOUT_DJANGO = ["-c", os.devnull, "--rootdir", ".", "--noconftest", "-p", "no:django"]
# module: the files that are mutated and the test files that run
MODULES: dict[str, tuple[list[str], list[str]]] = {
    "policy": (
        ["orchestrator/scheduling/policy.py"],
        [f"{TESTS}/scheduling/test_policy_boundaries.py", f"{TESTS}/scheduling/test_policy.py"],
    ),
    "states": (
        ["orchestrator/runs/states.py"],
        [f"{TESTS}/runs/test_{name}.py" for name in ("states", "attempts", "actions", "races")],
    ),
    "envelope": (
        ["workers/contracts/wire/envelope.py"],
        ["tests/workers/contracts/test_envelope.py"],
    ),
    "legality": (
        [
            "workers/contracts/specs/legality.py",
            "workers/contracts/specs/plan_rules/rule.py",
            "workers/contracts/specs/plan_rules/plan_alone.py",
            "workers/contracts/specs/plan_rules/model_shape.py",
            "orchestrator/planner/search/legality_masks.py",
        ],
        [
            "tests/workers/contracts/test_legality.py",
            "tests/workers/contracts/test_plan.py",
            f"{TESTS}/planner/search/test_enumeration.py",
        ],
    ),
    "ingest": (
        ["orchestrator/telemetry/ingest.py"],
        [f"{TESTS}/telemetry/test_ingest_loop.py", f"{TESTS}/telemetry/test_ingest.py"],
    ),
}


def main() -> int:
    """Measure the requested modules; 0 if no mutant survives that is not listed as equivalent."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", nargs="+", choices=list(MODULES), default=list(MODULES))
    parser.add_argument("--budget-s", type=float, default=1800, help="seconds for all modules")
    parser.add_argument("--sample", type=int, help="mutants per module, chosen at random")
    parser.add_argument("--seed", type=int, default=0, help="of the sample and the order")
    parser.add_argument("--processes", type=int, default=2)
    args = parser.parse_args()
    deadline, survivors, rows = time.monotonic() + args.budget_s, [], []
    for position, name in enumerate(args.only):
        # a module that needs less leaves its time to the next ones
        share = (deadline - time.monotonic()) / (len(args.only) - position)
        row, alive = measure(name, time.monotonic() + share, args)
        rows.append(row)
        survivors += alive
    print(
        f"\n{'module':10} {'mutants':>8} {'killed':>7} {'equivalent':>11} {'survived':>9} not run"
    )
    for name, total, killed, equivalent, survived, left in rows:
        print(f"{name:10} {total:8} {killed:7} {equivalent:11} {survived:9} {left:7}")
    for text in survivors:
        print(f"\n{text}")
    return 1 if survivors else 0


def measure(name: str, until: float, args: Any) -> tuple[tuple[Any, ...], list[str]]:
    """A row of the table and the survivors of one module; stops at the time `until`."""
    from mutants import find_mutants, make_mutant  # needs cosmic-ray

    files, tests = MODULES[name]
    options = WITHOUT_DJANGO if name in PURE else ["--nomigrations"]
    sources = {path: (ROOT / path).read_text() for path in files}
    jobs = [(path, *mutant) for path in files for mutant in find_mutants(sources[path])]
    total = len(jobs)
    random.Random(args.seed).shuffle(jobs)
    jobs = jobs[: args.sample][::-1]
    counts, survivors, lock = {"killed": 0, "equivalent": 0, "invalid": 0}, [], threading.Lock()

    def work(_: int) -> None:
        with Tree([*options, *tests]) as tree:
            while time.monotonic() < until:
                with lock:
                    if not jobs:
                        return
                    path, operator, number, line = jobs.pop()
                    code, diff = make_mutant(sources[path], operator, number)
                verdict = "invalid" if code is None else tree.verdict(path, code)
                text = sources[path].splitlines()[line - 1].strip()
                if verdict == "survived" and is_equivalent(name, text, operator, diff):
                    verdict = "equivalent"
                with lock:
                    if verdict == "survived":
                        survivors.append(f"{path}:{line} {operator}\n{diff}")
                        print(f"{name}: survived {survivors[-1]}", flush=True)
                    else:
                        counts[verdict] += 1

    with ThreadPoolExecutor(args.processes) as pool:
        list(pool.map(work, range(args.processes)))
    run = counts["killed"] + counts["equivalent"] + len(survivors)
    total -= counts["invalid"]
    row = (name, total, counts["killed"], counts["equivalent"], len(survivors), total - run)
    return row, survivors


def is_equivalent(name: str, text: str, operator: str, diff: str) -> bool:
    """Whether tests/mutation_equivalents.toml lists the mutant of this line."""
    listed = tomllib.loads((ROOT / "tests/mutation_equivalents.toml").read_text())
    return any(
        (item["module"], item["line"]) == (name, text)
        and operator in item["operators"]
        and item.get("becomes", "") in diff.partition("\n+")[2]
        for item in listed.get("equivalent", [])
    )


class Tree:
    """A copy of the working tree, and a process in it that runs its tests for each mutant."""

    def __init__(self, tests: list[str]) -> None:
        self._home = Path(tempfile.mkdtemp(prefix="orrery-mutation-"))
        self._tests = tests

    def __enter__(self) -> Tree:
        copy_tree(self._home / "tree")
        (self._home / "tmp").mkdir()
        environ = {**os.environ, "TMPDIR": str(self._home / "tmp"), "OMP_NUM_THREADS": "1"}
        self._process = subprocess.Popen(
            [PYTHON, str(ROOT / "tools/mutation_worker.py"), *self._tests],
            cwd=self._home / "tree",
            env=environ,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        if self._answer() != "ready":
            log = (self._home / "tree/mutation.log").read_text()
            self.__exit__()
            raise RuntimeError(f"The tests fail without a mutant:\n{log[-4000:]}")
        return self

    def __exit__(self, *_: object) -> None:
        assert self._process.stdin
        self._process.stdin.close()
        self._process.wait()
        shutil.rmtree(self._home, ignore_errors=True)

    def verdict(self, path: str, code: str) -> str:
        """`killed` if a test fails or does not end with this text of the module, or `survived`."""
        file = self._home / "tree" / path
        original = file.read_text()
        file.write_text(code)
        for cached in (file.parent / "__pycache__").glob(f"{file.stem}.*"):
            cached.unlink()
        assert self._process.stdin
        self._process.stdin.write("\n")
        self._process.stdin.flush()
        answer = self._answer()
        file.write_text(original)
        return answer

    def _answer(self) -> str:
        assert self._process.stdout
        return self._process.stdout.readline().strip()


def copy_tree(target: Path) -> None:
    """Copy the files that git tracks or would add."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    for name in set(subprocess.check_output(command, cwd=ROOT, text=True).split("\0")):
        if name and (ROOT / name).is_file():
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, target / name)


def environment() -> str:
    """The Python of .venv-mutation, installed from requirements/mutation.lock."""
    python, lock = ENVIRONMENT / "bin/python", ROOT / "requirements/mutation.lock"
    done = ENVIRONMENT / "installed.lock"
    if not done.exists() or done.read_text() != lock.read_text():
        venv.create(ENVIRONMENT, with_pip=True, clear=True)
        pip = [str(python), "-m", "pip", "install", "--quiet", "--require-hashes", "-r", str(lock)]
        subprocess.run(pip, check=True)
        shutil.copy(lock, done)
    return str(python)


if __name__ == "__main__":
    if Path(sys.prefix) != ENVIRONMENT:
        python = environment()
        os.execv(python, [python, __file__, *sys.argv[1:]])
    else:
        sys.exit(main())
