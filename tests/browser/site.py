"""A real web process with its own database, fed by REST; it can be killed and restarted."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import httpx

from tests import factories
from tests.flows.embedded import ROOT, clean_environ, free_port

_PREPARE = """
import json, django
django.setup()
from orchestrator.accounts import services
from tests import factories
owner = factories.user("owner")
print(json.dumps(services.token_create(user=owner, name="tests", by=owner)[1]))
"""


_REFRESH = """
import django
django.setup()
from orchestrator.telemetry import services
services.summaries_refresh(limit=100, wait=False)
"""


class Site:
    """`url` answers between `start` and `kill`; `owner` logs in with `factories.PASSWORD`, and owns
    the REST client. `home` has a migrated database.
    """

    def __init__(self, home: Path, redis_url: str) -> None:
        self.home = home
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.environ = {
            **clean_environ(),
            "ORRERY_HOME": str(home),
            "ORRERY_RATE_PER_MINUTE": "0",
            "REDIS_URL": redis_url,
            "DJANGO_SETTINGS_MODULE": "orchestrator.config.settings",
            "PYTHONPATH": str(ROOT),
        }
        data = subprocess.run(
            [sys.executable, "-c", _PREPARE],
            env=self.environ,
            cwd=ROOT,
            check=True,
            capture_output=True,
            text=True,
        ).stdout
        token = data.strip().splitlines()[-1].strip('"')
        self.client = httpx.Client(
            base_url=f"{self.url}/api/v1/", headers={"Authorization": f"Bearer {token}"}, timeout=60
        )
        self._process: subprocess.Popen[bytes] | None = None
        self._seq: dict[str, int] = {}
        self._cookie: dict[str, Any] | None = None

    def start(self) -> None:
        command = [
            sys.executable,
            "-m",
            "uvicorn",
            "orchestrator.config.asgi:application",
            "--port",
            str(self.port),
        ]
        with open(self.home / "web.log", "ab") as words:
            self._process = subprocess.Popen(
                command, env=self.environ, cwd=ROOT, stdout=words, stderr=words
            )
        deadline = time.monotonic() + 180
        while True:
            try:
                if httpx.get(f"{self.url}/login/", timeout=20).status_code == 200:
                    return
            except httpx.TransportError:
                if time.monotonic() > deadline or self._process.poll() is not None:
                    raise AssertionError((self.home / "web.log").read_text()[-3000:]) from None
                time.sleep(0.1)

    def kill(self) -> None:
        """Ends the web process as a crash does."""
        if self._process is not None:
            self._process.send_signal(signal.SIGKILL)
            self._process.wait(60)
            self._process = None

    def close(self) -> None:
        self.kill()
        self.client.close()

    def session(self) -> dict[str, Any]:
        """The cookie of the owner's login by the form, once for all: to check a password is meant
        to take long.
        """
        if self._cookie is None:
            self._cookie = {"name": "sessionid", "value": self._log_in(), "url": self.url}
        return self._cookie

    def _log_in(self) -> str:
        with httpx.Client(base_url=self.url, follow_redirects=False, timeout=60) as browser:
            browser.get("/login/")
            form = {
                "username": "owner",
                "password": factories.PASSWORD,
                "csrfmiddlewaretoken": browser.cookies["csrftoken"],
            }
            answer = browser.post("/login/", data=form, headers={"Referer": f"{self.url}/login/"})
            assert answer.status_code == 302, answer.text[-2000:]
            return str(browser.cookies["sessionid"])

    def external(self, name: str = "watched") -> str:
        """A run that only this test writes to."""
        answer = self.client.post("runs", json={"name": name, "spec": {"kind": "external"}})
        assert answer.status_code == 201, answer.text
        return str(answer.json()["id"])

    def log(self, run: str, first: int, count: int, rank: int = 0, **values: float) -> None:
        """Points of `count` steps; without values a loss that falls."""
        points = []
        for step in range(first, first + count):
            logged = values or {
                "loss": 5.0 / (1 + step / 50),
                "tokens_per_s": 1000.0,
                "grad_norm": 1.0,
            }
            key = f"{run}/{rank}"
            self._seq[key] = self._seq.get(key, 0) + 1
            point = {
                "seq": self._seq[key],
                "step": step,
                "tokens": step * 64,
                "time": time.time(),
                "rank": rank,
            }
            points.append({**point, "values": logged})
        answer = self.client.post(f"runs/{run}/points", json={"points": points})
        assert answer.status_code == 200 and answer.json()["accepted"] == count, answer.text

    def refresh_summaries(self) -> None:
        """Aggregates of metrics that the runs table and Compare read."""
        command = [sys.executable, "-c", _REFRESH]
        subprocess.run(command, env=self.environ, cwd=ROOT, check=True)

    def send_event(self, run: str, type: str, **data: Any) -> None:
        key = f"{run}/events"
        self._seq[key] = self._seq.get(key, 0) + 1
        event = {"seq": self._seq[key], "type": type, "time": time.time(), "rank": 0, "data": data}
        answer = self.client.post(f"runs/{run}/events", json={"events": [event]})
        assert answer.status_code == 200, answer.text

    def send_log(self, run: str, rank: int, first: int, *lines: str) -> None:
        body = [
            {"rank": rank, "seq": first + i, "time": time.time(), "text": text}
            for i, text in enumerate(lines)
        ]
        answer = self.client.post(f"runs/{run}/logs", json={"lines": body})
        assert answer.status_code == 200, answer.text


def chromium() -> str | None:
    """A Chromium of this machine: CHROMIUM, or one on the PATH."""
    import shutil

    given = os.environ.get("CHROMIUM")
    names = [given] if given else ["chromium", "chromium-browser", "google-chrome", "chrome"]
    return next((path for name in names if (path := shutil.which(name))), None)
