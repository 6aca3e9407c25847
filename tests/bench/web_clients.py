"""Clients of a web process across its outage: recorder, `orrery watch`, a page and a socket."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import httpx
from websockets.sync.client import connect

from tests.chaos.cluster import ROOT, Cluster, Part
from tests.flows.embedded import free_port

RECORD_S = 0.25  # between two points of the recorded program
_PROGRAM = """
import sys, time
from workers.recorder import orrery_recorder
run = orrery_recorder.init(name="outage", spool=sys.argv[1], capture=False, system_s=0)
for step in range(1, int(sys.argv[2]) + 1):
    run.log({"loss": 1 / step}, step=step)
    time.sleep(float(sys.argv[3]))
sys.exit(0 if run.finish(timeout_s=300) else 1)
"""


class WebClients:
    """A web process, and what people and programs have open; `start`, then `check` at the end."""

    def __init__(self, cluster: Cluster) -> None:
        self._folder = cluster.folder
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        (cluster.home / "static").mkdir(exist_ok=True)
        command = [sys.executable, "-m", "uvicorn", "orchestrator.config.asgi:application"]
        command += ["--port", str(self.port), "--log-level", "warning", "--ws-max-size", "65536"]
        self.web = Part("web", command, cluster.environ, self._folder / "web.log")
        self._environ = cluster.environ
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        self._seen: dict[str, Any] = {}
        self._steps = 0

    def open(self, run: int, outage_s: float) -> None:
        """Start the web process and all clients; `run` is watched."""
        from orchestrator.accounts import services as accounts
        from orchestrator.accounts.roles import Role
        from tests import factories

        user = factories.user(f"watcher-{time.time():.0f}", Role.ADMIN)
        _, self._token = accounts.token_create(user=user, name="watch", by=user)
        self._cookie = factories.client_for(user).cookies["sessionid"].value
        self.web.start()
        self._until_served()
        self._steps = int(outage_s / RECORD_S) + 200
        environ = {**self._environ, "ORRERY_URL": self.url, "ORRERY_TOKEN": self._token}
        spool = str(self._folder / f"spool-{run}")
        record = [sys.executable, "-c", _PROGRAM, spool, str(self._steps), str(RECORD_S)]
        watch = [str(Path(sys.executable).parent / "orrery"), "watch", str(run), "--json"]
        for name, command in (("recorder", record), ("watch", watch)):
            with open(self._folder / f"{name}.log", "ab") as log:
                self._processes[name] = subprocess.Popen(
                    command, cwd=ROOT, env=environ, stdout=log, stderr=log
                )
        self._seen = self._frame(run)
        self._run = run

    def check(self) -> list[str]:
        """What did not continue after the outage; call it when the watched run has ended."""
        self._until_served()
        problems = []
        for name, process in self._processes.items():
            try:
                code = process.wait(600)
            except subprocess.TimeoutExpired:
                process.kill()
                code = -9
            if code != 0:
                log = (self._folder / f"{name}.log").read_text(errors="replace")
                problems.append(f"{name} ended with {code}: {log[-500:]}")
        problems += self._lost_points()
        cookies = {"sessionid": self._cookie}
        for path in ("/", f"/runs/{self._run}/", "/outages/"):
            page = httpx.get(self.url + path, cookies=cookies, timeout=60)
            if page.status_code != 200:
                problems.append(f"the session of before shows {page.status_code} for {path}")
        query = f"?after={self._seen['seq']}&epoch={self._seen['epoch']}"
        frame = self._frame(self._run, query)
        if frame["type"] != "gap" and frame["seq"] != self._seen["seq"] + 1:
            problems.append(f"the socket continued with {frame} after {self._seen}")
        return problems

    def _lost_points(self) -> list[str]:
        from orchestrator.runs.models import Run
        from orchestrator.telemetry import selectors as telemetry

        run = Run.objects.filter(kind="external", name="outage").latest("pk")
        stored = telemetry.series(run=run, name="loss", points=5000)
        if run.state == "finished" and stored.total_points == self._steps:
            return []
        return [f"recorder: {run.state}, {stored.total_points} of {self._steps} points"]

    def _frame(self, run: int, query: str = "") -> dict[str, Any]:
        """The first frame of the run's socket; with `query` what follows a position."""
        address = f"ws://127.0.0.1:{self.port}/ws/runs/{run}/{query}"
        headers = {"Authorization": f"Bearer {self._token}"}
        with connect(address, additional_headers=headers, open_timeout=60) as socket:
            return dict(json.loads(socket.recv(timeout=60)))

    def _until_served(self) -> None:
        deadline = time.monotonic() + 120
        while True:
            try:
                if httpx.get(f"{self.url}/login/", timeout=60).status_code == 200:
                    return
            except httpx.TransportError:
                if time.monotonic() > deadline:
                    raise
            time.sleep(0.2)

    def close(self) -> None:
        """End what still runs."""
        for process in self._processes.values():
            if process.poll() is None:
                process.kill()
        self.web.kill()
