"""A small cluster of real processes: broker, scheduler, ingest, and agents behind proxies.

Ranks are fake (`fake_rank`); everything else is the product. All servers listen on loopback.
"""

from __future__ import annotations

import os
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

import psutil

from tests.chaos.disks import create_disks
from tests.chaos.network import NodeNetwork, create_networks
from tests.chaos.proxy import Proxy
from tests.flows.embedded import clean_environ, free_port

ROOT = Path(__file__).resolve().parents[2]
FAKE_TORCH = Path(__file__).resolve().parent / "fake_torch"
_STARTED_S = 3.0  # a new process may replace its program until then
# the product's defaults, about ten times faster
TIMES = {
    "ORRERY_HEARTBEAT_S": "0.5",
    "ORRERY_NODE_SILENT_S": "3",
    "ORRERY_NODE_LOST_S": "12",
    "ORRERY_LAUNCH_TIMEOUT_S": "30",
    "ORRERY_TICK_S": "0.5",
    "ORRERY_CANCEL_GRACE_S": "2",
    "ORRERY_HANG_S": "20",
}


class Part:
    """A process that is started again after it ended: broker, scheduler, ingest or an agent."""

    def __init__(self, name: str, command: list[str], environ: dict[str, str], log: Path) -> None:
        self.name, self._command, self._environ, self._log = name, command, environ, log
        self.code = ROOT  # the release that it runs from its next start on
        self.process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start the process unless it runs."""
        if self.process is None or self.process.poll() is not None:
            with open(self._log, "ab") as log:
                self.process = subprocess.Popen(
                    self._command,
                    cwd=self.code,
                    env=self._environ,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    start_new_session=True,
                )

    def kill(self) -> None:
        """End the process at once."""
        if self.process is not None:
            with suppress(ProcessLookupError):
                os.kill(self.process.pid, signal.SIGCONT)
            self.process.kill()
            self.process.wait()

    def pause(self) -> None:
        """Suspend the process."""
        if self.process is not None and self.process.poll() is None:
            self.process.send_signal(signal.SIGSTOP)

    def resume(self) -> None:
        """Continue a suspended process; start one that has ended."""
        if self.process is not None and self.process.poll() is None:
            self.process.send_signal(signal.SIGCONT)
        self.start()


class AgentNode:
    """One node: its agent, its proxy to the broker, and its own network if there is one."""

    def __init__(self, name: str, agent: Part, proxy: Proxy, network: NodeNetwork | None) -> None:
        self.name, self.agent, self.proxy, self.network = name, agent, proxy, network


class Cluster:
    """All parts under one temporary folder; `close` ends every process that was started.

    `times`: settings of the product. `disks`: put the data on small file systems, if possible.
    """

    def __init__(
        self,
        folder: Path,
        *,
        nodes: int,
        devices: int,
        skews_s: Sequence[float] = (0.0,),
        times: Mapping[str, str] = TIMES,
        step_s: float = 0.05,
        disks: bool = True,
    ) -> None:
        self.folder, self.devices = folder, devices
        self.code = ROOT  # the release of new agents
        self.home, self.nodes_home = folder / "control", folder / "nodes"
        self.journal = folder / "journal"
        for path in (self.home, self.nodes_home, self.journal, folder / "broker"):
            path.mkdir(parents=True)
        self._step_s = step_s
        folders = {"nodes": self.nodes_home, "database": self.home, "broker": folder / "broker"}
        self.disks = create_disks(folders) if disks else {}
        self._command_lines: dict[tuple[int, float], str] = {}
        self._password, self.broker_port = secrets.token_hex(8), free_port()
        self.environ = {
            **clean_environ(),
            **times,
            "ORRERY_HOME": str(self.home),
            "ORRERY_SECRET_KEY": secrets.token_hex(16),
            "ORRERY_SHARED_RUNS": "1",
            "REDIS_URL": self._url(self.broker_port),
        }
        self.broker = self._part("broker", [_server_binary(), *self._broker_options()])
        self.proxy = Proxy(self.broker_port)  # of the control plane
        manage = [sys.executable, "manage.py"]
        behind = {**self.environ, "REDIS_URL": self._url(self.proxy.port)}
        self.scheduler = self._part("scheduler", [*manage, "scheduler"], behind)
        self.ingest = self._part("ingest", [*manage, "ingest"], behind)
        self.agents: list[AgentNode] = []
        self._networks: list[NodeNetwork] = []
        self._wanted = [(f"node-{i}", skews_s[i % len(skews_s)]) for i in range(nodes)]

    def start(self, join_token: Callable[[], str]) -> None:
        """Start every part; `join_token` makes a token for one node. The database must exist."""
        self.broker.start()
        wait_until(self._broker_answers, 30, "the broker answers")
        self.scheduler.start()
        self.ingest.start()
        self._networks = create_networks(len(self._wanted))
        if not self._networks:
            print("chaos: no partitions, because namespaces need root and iproute2", flush=True)
        if not self.disks:
            print("chaos: no full disks, because mounting them needs root", flush=True)
        for number, (name, skew_s) in enumerate(self._wanted):
            network = self._networks[number] if self._networks else None
            proxy = Proxy(self.broker_port, host=network.address if network else "127.0.0.1")
            environ = {
                **self.environ,
                "REDIS_URL": self._url(proxy.port, proxy.host),
                "ORRERY_HOME": str(self.nodes_home),
                "ORRERY_JOIN": join_token(),
                "PYTHONPATH": str(FAKE_TORCH),
                "CHAOS_JOURNAL": str(self.journal),
                "CHAOS_STEP_S": str(self._step_s),
                "CHAOS_SKEW_S": str(skew_s),
            }
            command = [sys.executable, "-m", "workers.agent", "--name", name]
            command += ["--home", str(self.nodes_home), "--devices", str(self.devices)]
            command += ["--address", "127.0.0.1"]
            command = network.command(command) if network else command
            agent = Part(name, command, environ, self.folder / f"{name}.log")
            agent.code = self.code
            agent.start()
            self.agents.append(AgentNode(name, agent, proxy, network))

    def parts(self) -> list[Part]:
        """Every part that may be killed or suspended."""
        return [self.broker, self.scheduler, self.ingest, *(node.agent for node in self.agents)]

    def proxies(self) -> list[Proxy]:
        """The proxies of all nodes and of the control plane."""
        return [self.proxy, *(node.proxy for node in self.agents)]

    def heal(self) -> None:
        """End all faults: start and continue everything, forward everything, free all disks."""
        for disk in self.disks.values():
            disk.free()
        for proxy in self.proxies():
            proxy.heal()
        for node in self.agents:
            if node.network is not None:
                node.network.join()
        for part in self.parts():
            part.resume()
        for process in self.processes():
            with suppress(psutil.Error):
                process.resume()

    def processes(self, kind: str = "") -> Iterator[psutil.Process]:
        """Living processes of attempts: all, or those of a kind (supervisor, torchrun, rank)."""
        marks = {
            "supervisor": "workers.launcher",
            "torchrun": "torch.distributed.run",
            "rank": "fake_rank.py",
        }
        for process in psutil.process_iter():
            try:
                command = self._command_line(process)
                if str(self.nodes_home) not in command or "workers.agent" in command:
                    continue
                # torchrun's and the wrapper's command lines contain the rank's program
                is_wrapper = "rank_wrapper.py" in command
                if (kind == "rank" and is_wrapper) or (kind == "supervisor" and is_wrapper):
                    continue
                if not kind or marks[kind] in command:
                    yield process
            except psutil.Error:
                continue

    def _command_line(self, process: psutil.Process) -> str:
        """Its command line; that of an older process of this machine is read once."""
        key = (process.pid, process.create_time())
        command = self._command_lines.get(key)
        if command is None:
            command = " ".join(process.cmdline())
            if time.time() - process.create_time() > _STARTED_S:
                self._command_lines[key] = command
        return command

    def close(self) -> None:
        """End every process and proxy."""
        for part in self.parts():
            part.kill()
        for process in list(self.processes()):
            with suppress(psutil.Error):
                process.kill()
        for proxy in self.proxies():
            proxy.close()
        for network in self._networks:
            network.close()
        for disk in self.disks.values():
            disk.close()

    def _part(self, name: str, command: list[str], environ: dict[str, str] | None = None) -> Part:
        return Part(name, command, environ or self.environ, self.folder / f"{name}.log")

    def _url(self, port: int, host: str = "127.0.0.1") -> str:
        return f"redis://:{self._password}@{host}:{port}/0"

    def _broker_options(self) -> list[str]:
        options = {
            "bind": "127.0.0.1",
            "port": str(self.broker_port),
            "requirepass": self._password,
            "dir": str(self.folder / "broker"),
            "appendonly": "yes",
            "save": "",
        }
        return [word for name, value in options.items() for word in (f"--{name}", value)]

    def _broker_answers(self) -> bool:
        import redis

        try:
            with redis.Redis.from_url(self._url(self.broker_port)) as client:
                return bool(client.ping())
        except redis.RedisError:
            return False


def wait_until(condition: Callable[[], bool], seconds: float, description: str) -> None:
    """Poll until the condition holds. Raises TimeoutError."""
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError(f"{description}: not within {seconds:g} s")
        time.sleep(0.1)


def _server_binary() -> str:
    from orchestrator.config.embedded.broker import server_binary

    return server_binary()
