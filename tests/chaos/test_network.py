"""Namespaces of killed harnesses are removed; those of living ones are kept."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator

import pytest

from tests.chaos import network

OTHER = """
from tests.chaos import network
[created] = network.create_networks(1)
print(created.address)
created.close()
"""
KILLED = """
import os, signal
from tests.chaos import network
network.create_networks(1)
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.fixture
def living() -> Iterator[network.NodeNetwork]:
    networks = network.create_networks(1)
    if not networks:
        pytest.skip("namespaces need root and iproute2")
    yield networks[0]
    networks[0].close()


def test_the_next_harness_removes_what_a_killed_one_left(living: network.NodeNetwork) -> None:
    killed = subprocess.Popen([sys.executable, "-c", KILLED])
    killed.wait()
    removed = network.remove_stale()
    assert f"orr{killed.pid}x0" in removed
    assert not any(str(os.getpid()) in name for name in removed)
    assert network.remove_stale() == []


def test_two_harnesses_have_different_subnets(living: network.NodeNetwork) -> None:
    other = subprocess.run(
        [sys.executable, "-c", OTHER], capture_output=True, text=True, check=True
    )
    assert other.stdout.strip() != living.address
