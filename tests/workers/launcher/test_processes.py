"""Members of an attempt: by its fence, and by its node if two agents share a machine."""

from __future__ import annotations

import os
import subprocess
import sys
import uuid

from workers.launcher import processes


def test_a_node_ends_its_own_share_and_leaves_the_other_nodes() -> None:
    fence = uuid.uuid4().hex
    sleeps = [sys.executable, "-c", "import time; time.sleep(60)"]
    mine, others = (
        subprocess.Popen(sleeps, env={**os.environ, "ORRERY_FENCE": fence, "ORRERY_NODE": node})
        for node in ("here", "there")
    )
    try:
        assert {process.pid for process in processes.members(fence)} == {mine.pid, others.pid}
        assert processes.kill_all(fence, node="here") == []
        assert mine.wait(10) == -9 and others.poll() is None
        assert processes.kill_all(fence) == [] and others.wait(10) == -9
    finally:
        for process in (mine, others):
            process.kill()
            process.wait(10)
