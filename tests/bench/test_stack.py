"""Servers of benchmarks and tests end with the process that started them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest

from tests.bench.stack import ROOT, postgresql_programs
from tests.kubernetes.cluster import until

START = """
import sys
from tests.bench.stack import postgresql
with postgresql(durable=False) as url:
    print(url, flush=True)
    sys.stdin.read()
"""


@pytest.mark.flow
@pytest.mark.skipif(not postgresql_programs(), reason="needs PostgreSQL")
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_postgresql_ends_with_a_killed_benchmark(number: signal.Signals) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", START],
        cwd=ROOT,
        env={**os.environ, "DJANGO_SETTINGS_MODULE": "tests.settings"},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        url = process.stdout.readline().strip()
        port = url.rpartition(":")[2].partition("/")[0]
        assert answers(port)
        process.send_signal(number)
        process.wait(60)
    until(lambda: not answers(port))


def answers(port: str) -> bool:
    programs = postgresql_programs()
    assert programs is not None
    command = [programs / "pg_isready", "-q", "-h", "127.0.0.1", "-p", port]
    return subprocess.run(command).returncode == 0
