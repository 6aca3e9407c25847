"""A real `manage.py up` in a temporary home, driven through its output, REST and signals."""

from __future__ import annotations

import json
import os
import random
import re
import signal
import socket
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

import httpx
import psutil

ROOT = Path(__file__).resolve().parents[2]
T = TypeVar("T")

TINY: dict[str, Any] = {
    "name": "tiny-flow",
    "layers": 2,
    "hidden": 32,
    "heads": 4,
    "ffn": 64,
    "vocab": 256,
    "max_seq_len": 64,
    "gated_mlp": True,
    "activation": "silu",
    "norm": "rmsnorm",
    "position": "rope",
    "tie_embeddings": True,
}


def train_spec(*, steps: int, ranks: int = 2, every: int = 20, **more: Any) -> dict[str, Any]:
    """A small real training run on `ranks` processes with a checkpoint each `every` steps."""
    plan = {"dp": ranks, "zero": 1, "micro_batch_size": 2, "global_batch_size": 2 * ranks}
    train = {
        "steps": steps,
        "seq_len": 32,
        "checkpoint": {"every_steps": every, "keep": 2, "async": False},
    }
    return {"kind": "train", "model": TINY, "plan": plan, "train": train, **more}


class Orrery:
    """Starts and stops embedded Orrery. `environ` adds settings; `devices` is its CPU slots."""

    def __init__(
        self, home: Path, *, devices: int = 4, environ: dict[str, str] | None = None
    ) -> None:
        self.home = home
        self.devices = devices
        self.port = free_port()
        self.environ = {
            **clean_environ(),
            "ORRERY_DEMO": "0",
            "OMP_NUM_THREADS": "1",
            **(environ or {}),
        }
        self.process: subprocess.Popen[bytes] | None = None
        self.client: httpx.Client | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def words(self) -> str:
        return (self.home / "words").read_text()

    def command(self) -> list[str]:
        options = [
            "--home",
            str(self.home),
            "--port",
            str(self.port),
            "--devices",
            str(self.devices),
        ]
        return [sys.executable, str(ROOT / "manage.py"), "up", *options]

    def start(self, *, client: bool = True) -> None:
        self.home.mkdir(parents=True, exist_ok=True)
        with open(self.home / "words", "wb") as words:
            self.process = subprocess.Popen(
                self.command(), stdout=words, stderr=words, env=self.environ
            )
        self.until(lambda: "Orrery is up" in self.words, 180, "up says that it is up")
        if client and self.client is None:
            self.client = self.log_in("admin", "admin")

    def log_in(self, username: str, role: str) -> httpx.Client:
        """A REST client with a fresh token, made by the command that people use."""
        command = [
            sys.executable,
            str(ROOT / "manage.py"),
            "token",
            username,
            "--role",
            role,
            "--create",
            "--json",
        ]
        environ = {**self.environ, "ORRERY_HOME": str(self.home)}
        done = subprocess.run(command, env=environ, capture_output=True, text=True, check=True)
        token = json.loads(done.stdout)["token"]
        headers = {"Authorization": f"Bearer {token}"}
        return httpx.Client(base_url=f"{self.url}/api/v1/", headers=headers, timeout=60)

    def shell(self, code: str) -> str:
        """What this Python code prints where the control plane's own rooms can be imported
        (`manage.py shell`).
        """
        folder = self.home / "valkey"
        password, port = (
            (folder / "password").read_text().strip(),
            (folder / "port").read_text().strip(),
        )
        environ = {
            **self.environ,
            "ORRERY_HOME": str(self.home),
            "REDIS_URL": f"redis://:{password}@127.0.0.1:{port}/0",
        }
        command = [sys.executable, str(ROOT / "manage.py"), "shell", "--no-imports", "-c", code]
        done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=180)
        assert done.returncode == 0, done.stderr
        return done.stdout

    def get(self, path: str, **params: Any) -> Any:
        assert self.client is not None
        answer = self.client.get(path, params=params)
        assert answer.status_code == 200, answer.text
        return answer.json()

    def submit(self, spec: dict[str, Any], name: str = "flow") -> str:
        assert self.client is not None
        answer = self.client.post("runs", json={"name": name, "spec": spec})
        assert answer.status_code == 201, answer.text
        return str(answer.json()["id"])

    def state(self, run: str) -> str:
        return str(self.get(f"runs/{run}")["state"])

    def steps(self, run: str, name: str = "loss", **params: Any) -> list[int]:
        """The steps that the series has, none left out."""
        return list(self.get(f"runs/{run}/series", name=name, raw=1, **params)["x"])

    def until_state(self, run: str, *states: str, seconds: float = 240) -> str:
        def reached() -> str | None:
            state = self.state(run)
            return state if state in states else None

        return self.until(reached, seconds, f"run {run} is {' or '.join(states)}")

    def until_step(self, run: str, step: int, seconds: float = 240) -> int:
        return self.until(
            lambda: next((s for s in self.steps(run)[-1:] if s >= step), None),
            seconds,
            f"step {step}",
        )

    def events(self, run: str, *types: str) -> list[dict[str, Any]]:
        """All of them, or those of some types, oldest first."""
        match: list[dict[str, Any]] = []
        wanted = {"type": ",".join(types)} if types else {}
        while True:
            last = match[-1]["seq"] if match else 0
            page = self.get(f"runs/{run}/events", limit=200, after_seq=last, **wanted)
            match += page["items"]
            if page["next_cursor"] is None:
                return match

    def until_reported(self, run: str) -> None:
        """Wait for all points of the ranks; an exit report waits only a few seconds for them."""

        def result() -> bool:
            heard = Counter(
                (each["attempt"], each["rank"], each["type"]) for each in self.events(run)
            )
            place = self.home / "runs" / run
            for folder in place.glob("attempt-*/**/rank-[0-9]*"):
                attempt = int(folder.relative_to(place).parts[0].removeprefix("attempt-"))
                rank = int(folder.name.removeprefix("rank-"))
                written = Counter(
                    (attempt, rank, each["type"]) for each in _lines(folder / "events.jsonl")
                )
                points = len(_lines(folder / "points.jsonl"))
                if written - heard or (
                    points and len(self.steps(run, rank=rank, attempt=attempt)) < points
                ):
                    return False
            return True

        self.until(result, 120, f"all of run {run} is reported")

    def until(
        self, condition: Callable[[], T | None], seconds: float, what: str, *, every_s: float = 0.4
    ) -> T:
        """Polls until the condition holds; a timeout fails with the last log lines of every
        process.

        Pauses grow to `every_s`: ten requests a second took a tenth of a core while a run starts.
        """
        deadline = time.monotonic() + seconds
        pause_s = 0.05
        last: Exception | None = None
        while time.monotonic() < deadline:
            try:
                value = condition()
                if value:
                    return value
            except (
                httpx.TransportError,
                AssertionError,
            ) as error:  # a server that is just coming back
                last = error
            time.sleep(pause_s)
            pause_s = min(every_s, 1.4 * pause_s)
        raise AssertionError(f"{what}: not within {seconds} s ({last})\n{self.last_lines()}")

    def folder(self, run: str, attempt: int = 1) -> Path:
        return self.home / "runs" / run / f"attempt-{attempt}"

    def written(self, run: str, attempt: int = 1, rank: int = 0) -> int:
        """Points that a rank has written to its disk, reported or not."""
        return len(_lines(self.folder(run, attempt) / f"rank-{rank}" / "points.jsonl"))

    def ranks_of(self, run: str, attempt: int = 1) -> list[int]:
        """The processes that compute."""
        files = sorted(self.folder(run, attempt).glob("rank-*/process.json"))
        return [int(json.loads(path.read_text())["pid"]) for path in files]

    def pid_of(self, name: str) -> int:
        """The process of one part: valkey, scheduler, ingest, web or agent."""
        listed = json.loads((self.home / "up.json").read_text())
        match = [int(entry["pid"]) for entry in listed if entry["name"] == name]
        assert match, f"{name} is not up"
        return match[0]

    def processes(self) -> list[psutil.Process]:
        """Every living process that was started under this home."""
        match = []
        for process in psutil.process_iter():
            try:
                environ = process.environ()
                ours = environ.get("ORRERY_HOME") == str(self.home)
                ours = ours or environ.get("ORRERY_RUN_DIR", "").startswith(str(self.home))
                if ours and process.status() != psutil.STATUS_ZOMBIE:
                    match.append(process)
            except psutil.Error:
                continue
        return [process for process in match if process.pid != os.getpid()]

    def tidy(self) -> None:
        """Starts what a test left lying, and cancels what it left running: the next test needs the
        devices.
        """
        assert self.process is not None
        if self.process.poll() is not None:
            self.start()
        left = [
            run
            for run in self.get("runs", limit=100)["items"]
            if run["kind"] != "external" and not run["ended"]
        ]
        for run in left:
            if run["state"] != "paused":
                assert self.client is not None
                self.client.post(f"runs/{run['id']}/cancel")
                self.until_state(str(run["id"]), "cancelled", "finished", "failed")

    def stop(self, number: int = signal.SIGTERM) -> float:
        """Asks it to stop and returns the seconds it took."""
        assert self.process is not None
        begun = time.monotonic()
        self.process.send_signal(number)
        self.process.wait(120)  # against a hang
        return time.monotonic() - begun

    def close(self) -> None:
        if self.process is not None and self.process.poll() is None:
            self.stop()
        for process in self.processes():
            with suppress(psutil.NoSuchProcess):
                process.kill()
        if self.client is not None:
            self.client.close()

    def last_lines(self) -> str:
        parts = [f"--- up\n{self.words[-1500:]}"]
        for path in sorted((self.home / "logs").glob("*.log")):
            parts.append(f"--- {path.name}\n{path.read_text(errors='replace')[-1500:]}")
        for path in sorted((self.home / "runs").glob("*/attempt-*/supervisor.log")):
            parts.append(
                "--- "
                f"{path.parent.parent.name}/{path.parent.name}\n{path.read_text(errors='replace')[-1500:]}"
            )
        return "\n".join(parts)


def lives(process: psutil.Process) -> bool:
    """Whether it still runs; another one may have got its number."""
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def words_of(process: psutil.Process) -> list[str]:
    """Its command line; of one that has just ended, none."""
    try:
        return process.cmdline()
    except psutil.Error:
        return []


def clean_environ() -> dict[str, str]:
    """The caller's environment without Orrery's own settings and pytest's marks."""
    return {
        name: value
        for name, value in os.environ.items()
        if not re.match(r"ORRERY_|DATABASE_URL|REDIS_URL|DJANGO_|PYTEST_|PYTHONWARNINGS", name)
    }


_taken: list[int] = []  # descriptors, which stay open until this process ends


def free_port() -> int:
    """A port that no process gets before a server of this process listens on it, nor while that is
    started again.

    It lies below the ports that the system gives out by itself. This process holds a name, which
    keeps other processes of tests away from the port.
    """
    given_from = _first_given_port()
    ports = range(max(1024, given_from - 8000), given_from) or range(20_000, 28_000)
    for port in random.sample(ports, len(ports)):
        holder = socket.socket(socket.AF_UNIX)
        with socket.socket() as probe:
            try:
                if sys.platform == "linux":  # a name without a file, gone with its holder
                    holder.bind(f"\0orrery-tests-{port}")
                probe.bind(("127.0.0.1", port))
            except OSError:
                holder.close()
                continue
        _taken.append(holder.detach())
        return port
    raise OSError(f"none of the ports {ports.start} to {ports.stop} is free")


def _first_given_port() -> int:
    try:
        return int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    except OSError:
        return 49152


def _lines(path: Path) -> list[dict[str, Any]]:
    """The whole lines of a file that grows; none where there is no file yet."""
    whole = path.read_bytes().rpartition(b"\n")[0] if path.exists() else b""
    return [json.loads(line) for line in whole.splitlines()]
