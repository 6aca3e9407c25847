"""A control plane for tests: lets a real agent join, reads its messages, sends sealed orders."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import pytest
import redis
from celery import Celery

from tests.workers.launcher.harness import ROOT, Node
from workers.contracts.wire import envelope, liveness, names, versions
from workers.contracts.wire.broker.tls import tls_options

T = TypeVar("T")


class Agent:
    """One agent process and its control plane.

    `bench` is the launcher tests' node, with the agent's secret.
    """

    def __init__(self, home: Path, url: str) -> None:
        self.home, self.url = home, url
        home.mkdir()
        self.token_id, self.token = envelope.join_token_new()
        self.key = envelope.join_token_parts(self.token)[1]
        self.bench = Node(home, url, ear=False)
        (home / "agent" / "n1" / "node.json").unlink()
        self.beats: list[dict[str, Any]] = []
        self._beat = ""
        self.joins: list[dict[str, Any]] = []
        self.collected: list[dict[str, Any]] = []  # reports of garbage collection
        self.process: subprocess.Popen[bytes] | None = None
        # as a scheduler publishes them
        with redis.Redis.from_url(url, **tls_options(url)) as client:
            client.set(names.CONTROL, json.dumps(self.versions()))
        self._app = Celery("test", broker=names.broker_url(url), set_as_current=False)
        self._app.conf.broker_use_ssl = tls_options(url) or None
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._listen, daemon=True)
        self._thread.start()

    @staticmethod
    def versions() -> dict[str, str]:
        """The versions of this control plane."""
        return {"release": versions.RELEASE, "wire": str(versions.WIRE)}

    def start(self, *options: str, join: bool = True) -> None:
        environ = {**os.environ, "ORRERY_HEARTBEAT_S": "0.2"} | (
            {"ORRERY_JOIN": self.token} if join else {}
        )
        # as on a node: with this variable, Celery makes the agent's app the default of all threads
        environ.pop("DJANGO_SETTINGS_MODULE", None)
        command = [
            sys.executable,
            "-m",
            "workers.agent",
            "--redis",
            self.url,
            "--name",
            "n1",
            "--home",
            str(self.home),
        ]
        beats = len(self.beats)
        with open(self.home / "agent.log", "ab") as log:
            self.process = subprocess.Popen(
                [*command, "--devices", "2", *options],
                cwd=ROOT,
                env=environ,
                stdout=log,
                stderr=log,
            )
        self.until(lambda: len(self.beats) > beats, "a heartbeat")

    def end(self, number: int = signal.SIGTERM) -> None:
        assert self.process is not None
        self.process.send_signal(number)
        self.process.wait(120)  # against a hang

    def sealed(self, kind: str, body: dict[str, Any], **more: Any) -> str:
        secret = more.pop("secret", self.bench.secret)
        return envelope.seal(
            secret, kind, body, **{"ttl_s": 60, "now": time.time(), "node": "n1", **more}
        )

    def send(self, task: str, text: str) -> None:
        self._app.send_task(task, args=[text], queue=names.node_queue("n1"))

    def launch(self, order: dict[str, Any]) -> Path:
        self.send(names.TASK_LAUNCH, self.sealed(names.KIND_LAUNCH, order))
        path = self.home / order["run_dir"]
        self.until(lambda: (path / "supervisor.json").exists(), "supervisor.json")
        return path

    def control(self, order: dict[str, Any], action: str, grace_s: float = 1.0) -> None:
        body = {
            "attempt_id": order["attempt_id"],
            "fence": order["fence"],
            "action": action,
            "grace_s": grace_s,
        }
        self.send(names.TASK_CONTROL, self.sealed(names.KIND_CONTROL, body))

    def until(self, query: Callable[[], T | None], what: str, seconds: float = 120) -> T:
        try:
            return self.bench.until(query, seconds, what)
        except AssertionError as error:
            raise AssertionError(f"{error}\n{self.log()}") from None

    def log(self) -> str:
        return (self.home / "agent.log").read_text()

    def close(self) -> None:
        if self.process is not None and self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        self._stopping.set()
        self._thread.join(10)
        self._app.close()
        self.bench.close()

    def _listen(self) -> None:
        # in this order: what was sent before a report is taken before it
        after: dict[str, str] = dict.fromkeys(
            [
                names.TELEMETRY,
                names.telemetry_stream("n1"),
                names.JOINS,
                names.REPORTS,
                names.reports_stream("n1"),
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
                            self._take(client, fields[names.FIELD_MESSAGE])
                    beats: Any = client.xrevrange(liveness.heartbeat_key("n1"), count=1)
                    self._take_beat(beats[0][1][liveness.FIELD_BEAT] if beats else None)
                except redis.RedisError:
                    self._stopping.wait(0.1)

    def _take_beat(self, value: Any) -> None:
        """Record the newest heartbeat unless it is known."""
        if not value or value == self._beat or not self.bench.secret:
            return
        self._beat = value
        with contextlib.suppress(envelope.EnvelopeError):  # of another test on the same server
            kind = names.KIND_HEARTBEAT
            self.beats.append(
                envelope.open_envelope(self.bench.secret, value, kind=kind, now=time.time())
            )

    def _take(self, client: redis.Redis, text: str) -> None:
        kind = envelope.peek(text)[0]
        if kind == names.KIND_JOIN:
            body = envelope.open_envelope(self.key, text, kind=kind, now=time.time())
            reply, self.bench.secret = envelope.join_reply(self.key, body["request"], node="n1")
            reply |= self.versions()
            self.joins.append(body)
            client.rpush(names.join_reply_key(body["request"]["nonce_a"]), json.dumps(reply))
        elif kind == names.KIND_COLLECTED:
            with contextlib.suppress(envelope.EnvelopeError):  # of another test's agent
                self.collected.append(
                    envelope.open_envelope(self.bench.secret, text, kind=kind, now=time.time())
                )
        else:
            self.bench.take(client, text)


@pytest.fixture
def agent(tmp_path: Path, redis_url: str) -> Iterator[Agent]:
    with redis.Redis.from_url(redis_url) as client:
        client.flushall()
    made = Agent(tmp_path / "home", redis_url)
    yield made
    made.close()
