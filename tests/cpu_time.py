"""CPU time of each test in all its processes: `make test ARGS="-p tests.cpu_time"`.

Prints the CPU seconds of each test file, and of the tests that took most. CPU time hardly depends
on what else the machine does; the durations that pytest prints do. The time of a process counts
for the test that waited for its end, or during which it ran.
"""

from __future__ import annotations

import contextlib
import resource
from collections import Counter
from collections.abc import Iterator
from typing import Any

import psutil
import pytest

ROWS = 50
KEY = "cpu_seconds"

# of the process that prints: seconds by test, and by phase of a test process
_tests: Counter[str] = Counter()
_other: Counter[str] = Counter()
_last = 0.0


def used() -> float:
    """CPU seconds of this process, of its ended children and of its living descendants."""
    own = resource.getrusage(resource.RUSAGE_SELF)
    ended = resource.getrusage(resource.RUSAGE_CHILDREN)
    total = own.ru_utime + own.ru_stime + ended.ru_utime + ended.ru_stime
    for child in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.Error):
            times = child.cpu_times()
            total += times.user + times.system + times.children_user + times.children_system
    return total


def since_last() -> float:
    """CPU seconds since the last call."""
    global _last
    now = used()
    spent, _last = now - _last, now
    return max(0.0, spent)


def pytest_collection_finish(session: pytest.Session) -> None:
    spent = since_last()
    if hasattr(session.config, "workeroutput"):  # sent to the process that prints
        session.config.workeroutput[KEY] = spent
    else:
        _other["collection"] += spent


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Iterator[Any]:
    report = yield
    report.user_properties.append((f"{KEY} {call.when}", since_last()))
    return report


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    for name, value in report.user_properties:
        if name == f"{KEY} {report.when}":
            _tests[f"{report.nodeid} {report.when}"] += value


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any, error: object) -> None:
    _other["collection"] += getattr(node, "workeroutput", {}).get(KEY, 0.0)


@pytest.hookimpl(trylast=True)
def pytest_terminal_summary(
    terminalreporter: pytest.TerminalReporter, config: pytest.Config
) -> None:
    if hasattr(config, "workerinput"):
        return
    files: Counter[str] = Counter()
    for test, spent in _tests.items():
        files[test.partition("::")[0]] += spent
    write = terminalreporter.write_line
    write(f"CPU seconds: {sum(files.values()):.0f} tests, {sum(_other.values()):.0f} collection")
    for title, rows in (("files", files), ("tests", _tests)):
        write(f"most CPU seconds: {title}")
        for name, spent in rows.most_common(ROWS):
            write(f"{spent:8.2f} {name}")
