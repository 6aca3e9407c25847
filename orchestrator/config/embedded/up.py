"""`manage.py up`: all of Orrery on this machine, in the foreground, until Ctrl-C or SIGTERM."""

from __future__ import annotations

import os
import signal
import socket
import sys
import time
import urllib.request
from collections.abc import Mapping
from pathlib import Path
from types import FrameType

import psutil
from django.conf import settings

from orchestrator.config.embedded import broker, first_start, lock
from orchestrator.config.embedded.first_probe import FirstProbe
from orchestrator.config.embedded.processes import Child, ProcessManager

ROOT = Path(settings.BASE_DIR)


class Stop(Exception):
    """Raised in the main thread by the first INT, TERM or HUP."""


def up(*, devices: int) -> int:
    """Run until a signal. Returns the exit code: 0 after a clean stop, 1 if it cannot start."""
    env = settings.ENV
    home: Path = env.home
    url = f"http://{_shown_host(env.host)}:{env.port}/"
    processes = ProcessManager(home, log)
    try:
        held = lock.acquire(home, url)
        # with the lock, processes of an earlier start are orphans and may use the port
        processes.stop_leftovers()
        lock.check_port(env.host, env.port)
    except lock.AlreadyRunning as refusal:
        print(refusal, file=sys.stderr)
        return 1
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        # INT may be inherited as ignored: `make up &` in a script
        signal.signal(number, _raise_stop)
    probe: FirstProbe | None = None
    try:
        probe = _start(processes, home=home, devices=devices)
        _greet(processes, home, url)
        while True:
            processes.watch()
            if probe is not None:
                probe.poll()
            time.sleep(0.2)
    except Stop:
        log("stopping (active runs continue from their last checkpoint at the next start)")
        return 0
    finally:
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, signal.SIG_IGN)  # a second Ctrl-C must not leave orphans
        if probe is not None:
            probe.stop()
        processes.stop()
        _end_strays(home)
        held.close()


def _start(processes: ProcessManager, *, home: Path, devices: int) -> FirstProbe | None:
    """Start all processes. At a first start returns the probe that submits the demo run."""
    environ = {
        **os.environ,
        "ORRERY_HOME": str(home),
        "ORRERY_EMBEDDED": "1",
        # one node costs little, and its readings should move on the pages
        "ORRERY_HEARTBEAT_S": os.environ.get("ORRERY_HEARTBEAT_S", "2"),
        "PYTHONUNBUFFERED": "1",
    }
    # whitenoise warns if it is missing
    Path(settings.STATIC_ROOT).mkdir(parents=True, exist_ok=True)
    if not settings.ENV.redis_url:
        server = broker.prepare(home)
        environ["REDIS_URL"] = os.environ["REDIS_URL"] = settings.REDIS_URL = server.url
        processes.start(Child("valkey", server.command, environ, stop_order=3, stop_timeout_s=2.0))
    log("preparing the database")
    first_start.migrate()
    login = first_start.first_login(home)
    token = first_start.join_token(home, _node_name())
    first_start.forget_isolation(_node_name())
    if token is not None:
        environ["ORRERY_JOIN"] = token
    probe: FirstProbe | None = None
    if settings.ENV.demo and login is not None:
        if settings.ENV.first_probe_s:
            probe = FirstProbe(
                node=_node_name(),
                seconds=settings.ENV.first_probe_s,
                root=ROOT,
                log=log,
                then=first_start.submit_demo,
            )
        else:
            first_start.submit_demo()
    if not settings.ENV.data_roots:
        first_start.example_prompts(settings.DATA_ROOTS[0])
        first_start.example_data(settings.DATA_ROOTS[0])
    python, manage = sys.executable, str(ROOT / "manage.py")
    env = settings.ENV
    web = [
        python,
        "-m",
        "uvicorn",
        "orchestrator.config.asgi:application",
        "--host",
        env.host,
        "--port",
        str(env.port),
    ]
    web += [
        "--no-access-log",
        "--log-level",
        "warning",
        "--timeout-graceful-shutdown",
        "1",
        "--ws-max-size",
        "65536",
    ]
    web += [
        "--ws-per-message-deflate",
        "false",
    ]  # otherwise every frame is compressed once per socket
    if env.web_processes > 1:
        web += ["--workers", str(env.web_processes)]
    # REDIS_URL, with its password, is in the environment
    agent = [python, "-m", "workers.agent", "--devices", str(devices)]
    agent += ["--home", str(home), "--name", _node_name(), "--address", "127.0.0.1", "--stop-runs"]
    without_join = {name: value for name, value in environ.items() if name != "ORRERY_JOIN"}
    # the scheduler stops before the agent ends its runs, or it would place them on this node again
    processes.start(
        Child(
            "scheduler",
            [python, manage, "scheduler"],
            without_join,
            stop_order=0,
            stop_timeout_s=2.0,
        )
    )
    # a killed manager must not stop training: the agent is killed, its detached supervisors survive
    processes.start(
        Child("agent", agent, environ, stop_order=1, stop_timeout_s=8.0, on_orphan=signal.SIGKILL)
    )
    processes.start(Child("web", web, without_join, stop_order=1, stop_timeout_s=2.0))
    processes.start(Child("ingest", [python, manage, "ingest"], without_join, stop_order=2))
    processes.start(Child("jobs", [python, manage, "jobs"], without_join, stop_order=1))
    return probe


def _greet(processes: ProcessManager, home: Path, url: str) -> None:
    """Wait until the web process answers, then print its URL and the first login."""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        try:
            urllib.request.urlopen(f"{url}health/", timeout=2).read()
            break
        except OSError:
            processes.watch()
            time.sleep(0.1)
    else:
        log(f"the web process does not answer yet; see {home / 'logs' / 'web.log'}")
    log(f"Orrery is up: {url}")
    path = first_start.first_login_path(home)
    if path.exists():
        username, password = path.read_text().split()
        log(f"first login: {username} / {password}   (change it under Account; stored in {path})")
    log(_isolation(first_start.reported_isolation(_node_name(), patience_s=15)))
    log("Ctrl-C stops everything.")


def _isolation(reported: Mapping[str, str] | None) -> str:
    """What submitters can do on this machine, by what the node reported."""
    if reported is not None and reported.get("method") != "agent":
        return f"runs execute under {reported.get('detail')}, apart from this installation"
    why = f" ({reported['detail']})" if reported and reported.get("detail") else ""
    return (
        f"runs execute as this user{why}: everyone who may submit runs can read and change "
        "everything this user can, including this installation"
    )


def _end_strays(home: Path) -> None:
    """Kill remaining attempt processes of this data directory after a clean stop."""
    strays = []
    for process in psutil.process_iter():
        try:
            folder = process.environ().get("ORRERY_RUN_DIR", "")
        except psutil.Error:
            continue
        if folder.startswith(f"{home}{os.sep}") and process.pid != os.getpid():
            strays.append(process)
    for process in strays:
        process.kill()
    psutil.wait_procs(strays, timeout=1)


def _raise_stop(number: int, frame: FrameType | None) -> None:
    raise Stop


def _node_name() -> str:
    return socket.gethostname().split(".")[0] or "this-machine"


def _shown_host(host: str) -> str:
    return "127.0.0.1" if host in ("0.0.0.0", "::") else f"[{host}]" if ":" in host else host


def log(text: str) -> None:
    """Print a message for the user."""
    print(f"orrery: {text}", flush=True)
