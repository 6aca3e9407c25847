"""The probe before the demo run of a new installation, so that the demo's prediction is right.

Runs next to the pages, after the node has joined; the demo is submitted when it ends, also without
a result.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any

from workers.contracts.wire.maintenance.node_probe import NodeProbeReport

_JOIN_S = 20.0  # for the node's first heartbeat
_LATE_S = 35.0  # beyond the requested time: start and the step in progress, of a loaded machine


class FirstProbe:
    """Started by `poll`, which the caller repeats; `done` after it, in any case once."""

    def __init__(
        self,
        *,
        node: str,
        seconds: float,
        root: Path,
        log: Callable[[str], None],
        then: Callable[[], None],
    ) -> None:
        self.done = False
        self._node, self._seconds, self._root, self._log = node, seconds, root, log
        self._then = then
        self._begin = time.monotonic()
        self._process: subprocess.Popen[bytes] | None = None
        self._output: IO[Any] | None = None

    def poll(self) -> None:
        """Start the probe when the node has joined; store its result when it has ended."""
        if self.done:
            return
        waited = time.monotonic() - self._begin
        if self._process is None:
            ranks = _ranks(self._node)
            if ranks is not None:
                self._start(*ranks)
            elif waited > _JOIN_S:
                self._finish("the node has not joined; the demo run starts without a probe")
        elif self._process.poll() is not None:
            self._finish(self._store())
        elif waited > self._seconds + _LATE_S:
            self.stop()
            self._finish("the probe took too long; the demo run starts without it")

    def stop(self) -> None:
        """End the probe's processes."""
        if self._process is not None and self._process.poll() is None:
            self._process.terminate()
            self._process.wait()

    def _start(self, ranks: int, device: str) -> None:
        self._begin = time.monotonic()
        self._output = tempfile.TemporaryFile()  # noqa: SIM115 -- read when the process has ended
        command = [sys.executable, "-m", "workers.probe", "--ranks", str(ranks)]
        command += ["--device", device, "--seconds", str(self._seconds), "--short", "--force"]
        self._process = subprocess.Popen(
            command,
            cwd=self._root,
            env={name: value for name, value in os.environ.items() if name != "REDIS_URL"},
            stdin=subprocess.DEVNULL,
            stdout=self._output,
            stderr=subprocess.DEVNULL,
        )

    def _store(self) -> str:
        from orchestrator.fleet.models import Node
        from orchestrator.planner.store.node_probes import probe_record

        assert self._output is not None
        self._output.seek(0)
        try:
            document = json.loads(self._output.read().splitlines()[-1])
            if "problem" in document:
                return f"not probed: {document['problem']}"
            report = NodeProbeReport.from_dict(document)
            probe_record(node=Node.objects.get(name=self._node), report=report)
        except (ValueError, IndexError, Node.DoesNotExist) as error:
            return f"the probe of this machine failed ({type(error).__name__})"
        return f"probed this machine in {time.monotonic() - self._begin:.0f} s for its predictions"

    def _finish(self, text: str) -> None:
        self.done = True
        if self._output is not None:
            self._output.close()
        self._log(text)
        self._then()


def _ranks(name: str) -> tuple[int, str] | None:
    """`(processes, device)` of a probe of this node; None before its first heartbeat."""
    from orchestrator.fleet.models import Node

    node = Node.objects.filter(name=name).exclude(last_heartbeat=None).first()
    devices = [] if node is None else list(node.devices.order_by("index"))
    if not devices:
        return None
    if devices[0].kind == "gpu":
        return len(devices), devices[0].catalogue or "cpu"
    return min(len(devices), os.cpu_count() or 1), "cpu"
