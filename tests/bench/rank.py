"""One rank of a running attempt: recorder, supervisor's shipping, and a client of the run page."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any


class Rank:
    """Logs steps at a constant rate; each point contains the time when it was logged."""

    def __init__(self, home: Path, rate_hz: float) -> None:
        from django.conf import settings

        from orchestrator.fleet.selectors import node_secret
        from tests import factories
        from workers.contracts.wire.node_messages import LaunchOrder
        from workers.launcher.rundir import RunDir, write_json
        from workers.launcher.shipping.redis_link import Link
        from workers.launcher.shipping.telemetry_sender import TelemetrySender
        from workers.metrics.recorder import Recorder

        self.owner = factories.user("bench")
        node = factories.node(devices=1)
        attempt = factories.running(factories.run(self.owner), node)
        self.run = attempt.run
        run_dir = RunDir(home / "runs" / str(self.run.pk) / "attempt-1")
        run_dir.rank(0).mkdir(parents=True)
        run_dir.rank(-1).mkdir()
        node_file = home / "node.json"
        secret = node_secret(node).hex()
        write_json(
            node_file,
            {
                "node": node.name,
                "secret": secret,
                "redis": settings.REDIS_URL,
                "address": "127.0.0.1",
            },
        )
        order = LaunchOrder(
            run=str(self.run.pk),
            kind="train",
            attempt=1,
            attempt_id=str(attempt.pk),
            fence=str(attempt.fence),
            spec=self.run.spec,
            local_devices=[0],
            local_ranks=1,
            world_size=1,
            run_dir=str(run_dir.path),
        )
        self._recorder = Recorder(run_dir.rank(0), run=str(self.run.pk), attempt=1, rank=0)
        self._sender = TelemetrySender(
            run_dir, order, Link(node_file, order), on_event=lambda event: None
        )
        self._rate_hz = rate_hz
        self._stop = threading.Event()
        self.steps = 0

    @contextmanager
    def logging(self) -> Iterator[None]:
        threads = [threading.Thread(target=work) for work in (self._log, self._ship)]
        for thread in threads:
            thread.start()
        try:
            yield
        finally:
            self._stop.set()
            for thread in threads:
                thread.join()

    def _log(self) -> None:
        start = time.time()
        more = {f"metric/{i}": 0.123456789 * i for i in range(28)}
        while not self._stop.wait(max(0.0, start + self.steps / self._rate_hz - time.time())):
            self.steps += 1
            values = {"loss": 2.5, "logged_at": time.time(), **more}
            self._recorder.point(step=self.steps, tokens=self.steps * 4096, values=values)

    def _ship(self) -> None:
        from workers.launcher.supervisor import POLL_S

        while not self._stop.wait(POLL_S):
            self._sender.pump()
        time.sleep(0.2)  # the recorder's last flush
        self._sender.pump(final=True)


class Page:
    """A socket client like the run page's: reconnects after the last sequence number it has."""

    def __init__(self, url: str, token: str) -> None:
        self._url, self._headers = url, {"Authorization": f"Bearer {token}"}
        self._seq, self._epoch = 0, ""
        self.arrivals: list[tuple[int, float, float]] = []  # (step, logged at, arrived at)
        self.gaps = 0
        self.caught_up_s: list[float] = []  # after each connection

    async def watch(self, until: asyncio.Event, head: Any) -> None:
        """Follows the topic until the event is set; `head()` returns its newest sequence number."""
        from websockets.asyncio.client import connect
        from websockets.exceptions import WebSocketException

        while not until.is_set():
            place = f"?after={self._seq}&epoch={self._epoch}" if self._epoch else "?after=0"
            began = time.perf_counter()
            try:
                async with connect(
                    self._url + place, additional_headers=self._headers, ping_interval=None
                ) as socket:
                    wanted, waiting = await asyncio.to_thread(head), True
                    while not until.is_set():
                        with suppress(TimeoutError):
                            self._take(await asyncio.wait_for(socket.recv(), 0.5))
                        if waiting and self._seq >= wanted:
                            self.caught_up_s.append(time.perf_counter() - began)
                            waiting = False
            except (OSError, WebSocketException):
                await asyncio.sleep(0.1)

    def _take(self, text: str | bytes) -> None:
        frame, now = json.loads(text), time.time()
        self._seq, self._epoch = frame["seq"], frame["epoch"]
        if frame["type"] == "gap":
            self.gaps += 1
        elif frame["type"] == "points":
            for step, logged in frame["values"]["logged_at"]:
                self.arrivals.append((step, logged, now))
