"""A node without an agent: home, node file, Redis, acknowledging ingest, real supervisors."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
import threading
import time
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import psutil
import redis

from workers.contracts.wire import envelope, names
from workers.contracts.wire.broker.tls import tls_options
from workers.launcher import processes
from workers.launcher.rundir import RunDir, read_json, write_json

ROOT = Path(__file__).resolve().parents[3]
T = TypeVar("T")

POINTS = """
    import json, os, sys, time
    rank = os.environ["RANK"]
    folder = os.path.join(os.environ["ORRERY_RUN_DIR"], "rank-" + rank)
    points = open(folder + "/points.jsonl", "a")

    def point(n):
        row = {"run": "?", "attempt": 1, "rank": int(rank), "seq": n, "step": n, "tokens": n}
        row["time"] = time.time()
        points.write(json.dumps({**row, "values": {"loss": 1 / n}}) + "\\n")
        points.flush()
"""


def script(text: str, *, points: bool = False) -> str:
    return textwrap.dedent(POINTS if points else "import os, sys, time\n") + textwrap.dedent(text)


class Node:
    """`ingest` acknowledges telemetry as the control plane would; `reports` and `batches` keep what
    came.

    Without an `ear` another listener passes on what belongs to it.
    """

    def __init__(
        self, home: Path, redis_url: str, name: str = "n1", *, ingest: bool = True, ear: bool = True
    ) -> None:
        self.home, self.name, self.url, self.secret = home, name, redis_url, os.urandom(32)
        self.node_file = home / "agent" / name / "node.json"
        self.node_file.parent.mkdir(parents=True)
        facts = {
            "node": name,
            "secret": self.secret.hex(),
            "redis": redis_url,
            "address": "127.0.0.1",
            "token": "t",
        }
        write_json(self.node_file, facts)
        self.reports: list[dict[str, Any]] = []
        self.batches: list[dict[str, Any]] = []
        self.ingest = ingest
        self.fences: list[str] = []
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._listen, daemon=True)
        if ear:
            self._thread.start()

    def order(
        self, program: str | list[str], *, ranks: int = 2, run: str = "7", **more: Any
    ) -> dict[str, Any]:
        """A launch order for a script; text becomes a file."""
        command = program
        if isinstance(program, str):
            path = self.home / f"program-{uuid.uuid4().hex[:6]}.py"
            path.write_text(program)
            command = [str(path)]
        fence = uuid.uuid4().hex
        self.fences.append(fence)
        return {
            "run": run,
            "kind": "script",
            "attempt": 1,
            "attempt_id": f"{run}1",
            "fence": fence,
            "spec": {"kind": "script", "script": {"command": command}},
            "local_devices": list(range(ranks)),
            "local_ranks": ranks,
            "world_size": ranks,
            "run_dir": f"runs/{run}/attempt-1",
            "grace_s": 2.0,
            **more,
        }

    def launch(self, order: dict[str, Any]) -> RunDir:
        """Claims and starts as an agent does."""
        run_dir = RunDir(self.home / order["run_dir"])
        assert run_dir.claim(order)
        write_json(run_dir.agent, {"node": self.name, "node_file": str(self.node_file)})
        env = {**os.environ, "ORRERY_FENCE": order["fence"]}
        subprocess.run(
            [sys.executable, "-m", "workers.launcher", "--dir", str(run_dir.path)],
            cwd=ROOT,
            env=env,
            check=True,
        )
        return run_dir

    def reported(self, kind: str, seconds: float = 120) -> dict[str, Any]:
        """The data of the first report of that type."""
        return self.until(
            lambda: next((r["data"] for r in list(self.reports) if r["type"] == kind), None),
            seconds,
            kind,
        )

    def exited(
        self, order: dict[str, Any], seconds: float = 120, *, ended: bool = True
    ) -> dict[str, Any]:
        """The exit report; with `ended` no process of the attempt is left."""

        def find() -> dict[str, Any] | None:
            mine = [
                r
                for r in list(self.reports)
                if r["type"] == "exited" and r["fence"] == order["fence"]
            ]
            return mine[0]["data"] if mine else None

        result = self.until(find, seconds, "exited")
        if ended:
            self.until(
                lambda: not processes.members(order["fence"]),
                60,
                "every process of the attempt ended",
            )
        return result

    def seqs(self, stream: str, rank: int) -> list[int]:
        result: list[int] = []
        for batch in list(self.batches):
            if (batch["stream"], batch["rank"]) == (stream, rank):
                result += _seqs(batch)
        return result

    def lines(self, rank: int) -> list[str]:
        return [
            line
            for b in list(self.batches)
            if (b["stream"], b["rank"]) == ("logs", rank)
            for line in b["lines"]
        ]

    def until(self, query: Callable[[], T | None], seconds: float, what: str) -> T:
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            if result := query():
                return result
            time.sleep(0.02)
        logs = "".join(path.read_text()[-1500:] for path in self.home.glob("runs/*/*/*.log"))
        raise AssertionError(f"{what}: not within {seconds} s; reports {self.reports}\n{logs}")

    def pid(self, run_dir: RunDir, rank: int) -> int:
        return self.until(
            lambda: read_json(run_dir.rank(rank) / "process.json").get("pid"),
            120,
            f"rank {rank} up",
        )

    def close(self) -> None:
        self._stopping.set()
        if self._thread.is_alive():
            self._thread.join(10)
        for fence in self.fences:
            processes.kill_all(fence)
        leftover = [p for p in psutil.Process().children() if p.status() == psutil.STATUS_ZOMBIE]
        for process in leftover:
            process.wait(1)

    def _listen(self) -> None:
        # in this order: what was sent before a report is taken before it
        after: dict[str, str] = dict.fromkeys(
            [
                names.TELEMETRY,
                names.telemetry_stream(self.name),
                names.JOINS,
                names.REPORTS,
                names.reports_stream(self.name),
            ],
            "0",
        )
        with redis.Redis.from_url(
            self.url, decode_responses=True, **tls_options(self.url)
        ) as client:
            while not self._stopping.is_set():
                try:
                    for stream, entries in client.xread(after, block=50) or []:
                        for id, fields in entries:
                            after[stream] = id
                            self.take(client, fields[names.FIELD_MESSAGE])
                except redis.RedisError:
                    self._stopping.wait(0.1)

    def take(self, client: redis.Redis, text: str) -> None:
        try:
            kind, node = envelope.peek(text)
            if node != self.name or kind not in (names.KIND_REPORT, names.KIND_TELEMETRY):
                return
            body = envelope.open_envelope(self.secret, text, kind=kind, now=time.time())
        except envelope.EnvelopeError:
            return  # of another test: unreadable, or from a node of the same name
        if kind == names.KIND_REPORT:
            self.reports.append(body)
            return
        for batch in body["batches"]:
            self.batches.append(batch)
            if self.ingest:
                field = names.acked_field(batch["stream"], batch["rank"])
                client.hset(names.acked_key(body["attempt_id"]), field, str(_seqs(batch)[-1]))


def _seqs(batch: dict[str, Any]) -> list[int]:
    if batch["stream"] == "points":
        return list(batch["batch"]["seq"])
    if batch["stream"] == "logs":
        return list(range(batch["first_seq"], batch["first_seq"] + len(batch["lines"])))
    return [event["seq"] for event in batch["events"]]
