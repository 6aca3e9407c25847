"""A real Slurm cluster of two nodes on loopback ports: munged, slurmctld and two slurmd.

Needs root and Debian's packages munge and slurm-wlm; everything is in one temporary folder. The
scripts of deploy/slurm are its prolog and epilog. With slurmdbd and mariadb-server-core also
accounting, for sacct.
"""

from __future__ import annotations

import contextlib
import os
import pwd
import re
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path

from tests.flows.embedded import ROOT, free_port

BUNDLE = ROOT / "deploy" / "slurm"
PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "squeue")
_TABLES = Path("/usr/share/mysql/mysql_system_tables.sql")  # of mariadb-server-core
_DAEMON = 1
USER = pwd.getpwuid(65534).pw_name  # without permissions, and no account of the system
_PATH = "/usr/sbin:/usr/bin:/sbin:/bin"
_CONF = """\
ClusterName=t
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={ports[0]}
SlurmUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket,cred_expire=60
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool.%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.%n.log
ProctrackType=proctrack/pgid
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
MpiDefault=none
SchedulerParameters=bf_interval=1,sched_interval=1
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SlurmdParameters=config_overrides
ReturnToService=2
SlurmdTimeout=300
BatchStartTimeout=120
UnkillableStepTimeout=300
TCPTimeout=20
KillWait=8
MinJobAge=900
MessageTimeout=30
NodeName=n1 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[1]} CPUs=4
NodeName=n2 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[2]} CPUs=4
Prolog={folder}/prolog.sh
Epilog={folder}/epilog.sh
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
PartitionName=low Nodes=n1,n2 Default=YES MaxTime=60 State=UP PriorityTier=1 GraceTime=30
PartitionName=high Nodes=n1,n2 MaxTime=60 State=UP PriorityTier=10 PreemptMode=OFF
PartitionName=secret Nodes=n1,n2 AllowGroups=daemon State=UP
"""
_ACCOUNTING = """\
AccountingStorageType=accounting_storage/slurmdbd
AccountingStorageHost=127.0.0.1
AccountingStoragePass={folder}/munge.socket
AccountingStoragePort={ports[3]}
AccountingStorageEnforce=associations,limits,qos
"""
# a user of account lab with two of the three QOS; root has an account of its own
_RIGHTS = (
    "add account lab",
    "add account closed",
    "add qos limited MaxJobsPerUser=1",
    "add qos long",
    "add user {user} account=lab qos=normal,limited",
)
_TOKENS = """\
AuthAltTypes=auth/jwt
AuthAltParameters=jwt_key={folder}/jwt.key
"""
_DATABASE = """\
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
DbdHost=localhost
DbdPort={ports[3]}
SlurmUser=root
StorageType=accounting_storage/mysql
StorageHost=127.0.0.1
StoragePort={ports[4]}
StorageUser=root
StorageLoc=slurm
LogFile={folder}/slurmdbd.log
PidFile={folder}/slurmdbd.pid
"""


def has_accounting() -> bool:
    """Whether slurmdbd and its database can be started too."""
    programs = ("slurmdbd", "mariadbd", "sacctmgr")
    return _TABLES.exists() and all(shutil.which(name, path=_PATH) for name in programs)


def has_rest(*, tokens: bool = False) -> bool:
    """Whether slurmrestd can be started; `tokens`: with logins by JSON Web Token."""
    plugin = any(Path("/usr/lib").glob("*/slurm-wlm/auth_jwt.so"))
    return shutil.which("slurmrestd", path=_PATH) is not None and (plugin or not tokens)


def is_possible() -> bool:
    """Whether this machine has what the cluster needs."""
    return os.geteuid() == 0 and all(shutil.which(name, path=_PATH) for name in PROGRAMS)


def _listens(path: Path, port: int, tokens: bool) -> bool:
    """Whether slurmrestd accepts connections."""
    kind, address = (socket.AF_INET, ("127.0.0.1", port)) if tokens else (socket.AF_UNIX, str(path))
    with socket.socket(kind) as probe, contextlib.suppress(OSError):
        probe.connect(address)
        return True
    return False


@contextlib.contextmanager
def open_folder() -> Iterator[Path]:
    """A folder that other users may pass. Each session of pytest closes that of all sessions."""
    folder = Path(tempfile.mkdtemp(prefix="orrery-slurm-", dir="/tmp"))
    folder.chmod(0o711)
    yield folder
    shutil.rmtree(folder, ignore_errors=True)


class SlurmCluster:
    """Start it, then give `conf` to Slurm's commands as SLURM_CONF."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.conf = folder, folder / "slurm.conf"
        self.view: list[str] = []  # before slurmd: its jobs see what other users may see
        self.database: subprocess.Popen[bytes] | None = None
        self.rest: list[subprocess.Popen[bytes]] = []
        self.environ = {"PATH": _PATH, "SLURM_CONF": str(self.conf), "LANG": "C.UTF-8"}

    def start(self, *, accounting: bool = False) -> None:
        """With `accounting`, Slurm demands accounts and QOS of which USER has some."""
        for name in ("state", "spool.n1", "spool.n2"):
            (self.folder / name).mkdir(parents=True)
        for script in BUNDLE.glob("*.sh"):
            shutil.copy(script, self.folder)
        text = f"ORRERY_PYTHON={sys.executable}\nORRERY_PARTITIONS=low\n"
        (self.folder / "orrery.env").write_text(text)
        host = socket.gethostname().partition(".")[0]
        ports = [free_port() for _ in range(5)]
        conf = _CONF + _ACCOUNTING if accounting else _CONF
        if has_rest(tokens=True):
            conf += _TOKENS
            (self.folder / "jwt.key").write_bytes(secrets.token_bytes(32))
            (self.folder / "jwt.key").chmod(0o600)
        self.conf.write_text(conf.format(folder=self.folder, host=host, ports=ports))
        key = self.folder / "munge.key"
        key.write_bytes(secrets.token_bytes(1024))
        key.chmod(0o600)
        self.run(
            "munged",
            "--force",
            f"--socket={self.folder}/munge.socket",
            f"--key-file={key}",
            f"--log-file={self.folder}/munged.log",
            f"--pid-file={self.folder}/munged.pid",
            f"--seed-file={self.folder}/munged.seed",
        )
        if accounting:
            self._start_accounting(ports)
        self.start_controller()
        for node in ("n1", "n2"):
            self.run(*self.view, "slurmd", "-N", node)
        self.until(lambda: self.run("sinfo", "-h", "-p", "low", "-o", "%F") == "0/2/0/2", "idle")

    def _start_accounting(self, ports: list[int]) -> None:
        (self.folder / "mariadb").mkdir()
        words = [
            "/usr/sbin/mariadbd",
            "--no-defaults",
            "--user=root",
            f"--datadir={self.folder}/mariadb",
            "--innodb-buffer-pool-size=32M",
            "--innodb-log-file-size=8M",
        ]
        # slurmdbd reads accounts by a stored procedure, which is in a table of the system
        tables = "CREATE DATABASE mysql;\nUSE mysql;\n" + _TABLES.read_text()
        with open(self.folder / "mariadbd.log", "wb") as log:
            subprocess.run(
                [*words, "--bootstrap"],
                input=tables.encode(),
                env=self.environ,
                stdout=log,
                stderr=log,
                timeout=120,
            )
            words += ["--skip-grant-tables", f"--socket={self.folder}/mariadb.socket"]
            words += [f"--port={ports[4]}", "--bind-address=127.0.0.1"]
            self.database = subprocess.Popen(words, env=self.environ, stdout=log, stderr=log)
        socket_ = self.folder / "mariadb.socket"
        self.until(socket_.exists, "the database answers", seconds=60)
        conf = self.folder / "slurmdbd.conf"
        conf.write_text(_DATABASE.format(folder=self.folder, ports=ports))
        conf.chmod(0o600)
        self.run("slurmdbd")
        self.until(self._has_cluster, "slurmdbd answers", seconds=60)
        for line in _RIGHTS:
            self.run("sacctmgr", "-i", *line.format(user=USER).split())

    def _has_cluster(self) -> bool:
        with contextlib.suppress(AssertionError, subprocess.TimeoutExpired):
            if "t" not in self.run("sacctmgr", "-nP", "show", "cluster", "format=cluster").split():
                self.run("sacctmgr", "-i", "add", "cluster", "t")
            return True
        return False

    def start_rest(self, version: str = "v0.0.38", *, tokens: bool = False) -> str:
        """Start slurmrestd as daemon, which must not be root; returns its URL.

        `tokens`: over HTTP with JSON Web Tokens; otherwise a unix socket, where it knows its peer.
        """
        folder = self.folder / f"rest{len(self.rest)}"
        folder.mkdir()
        os.chown(folder, _DAEMON, _DAEMON)
        port = free_port()
        address = f"127.0.0.1:{port}" if tokens else f"unix:{folder}/socket"
        words = ["setpriv", f"--reuid={_DAEMON}", f"--regid={_DAEMON}", "--clear-groups"]
        words += ["slurmrestd", "-f", str(self.conf), "-s", f"openapi/{version}"]
        words += ["-a", "rest_auth/jwt" if tokens else "rest_auth/local", address]
        environ = {**self.environ, **({"SLURM_JWT": "daemon"} if tokens else {})}
        with open(self.folder / f"rest{len(self.rest)}.log", "wb") as log:
            self.rest.append(
                subprocess.Popen(
                    words, env=environ, stdin=subprocess.DEVNULL, stdout=log, stderr=log
                )
            )
        self.until(lambda: _listens(folder / "socket", port, tokens), "slurmrestd listens")
        return f"http://{address}" if tokens else address

    def start_controller(self) -> None:
        self.run("slurmctld")
        self.until(self._answers, "slurmctld answers")

    def stop_controller(self) -> None:
        """Stop it so that it saves everything, drained nodes too."""
        self._end("slurmctld", signal.SIGTERM)

    def kill_controller(self) -> None:
        """At once, after it has saved all jobs that it started: it does so every five seconds."""
        log = (self.folder / "slurmctld.log").read_text()
        started = re.findall(r"^\[([^\]]+)\].* (?:Allocate|Started) JobId=", log, re.MULTILINE)
        newest = max((datetime.fromisoformat(each).timestamp() for each in started), default=0.0)
        saved = self.folder / "state" / "job_state"
        self.until(lambda: saved.stat().st_mtime > newest, "slurmctld has saved its jobs")
        self._end("slurmctld", signal.SIGKILL)

    def run(self, *words: str) -> str:
        """The output of a command, which must succeed."""
        done = subprocess.run(
            words, env=self.environ, capture_output=True, text=True, timeout=90, cwd="/"
        )
        assert done.returncode == 0, (words, done.stderr)
        return done.stdout.strip()

    def job_of(self, run: str) -> str:
        """The number of the run's newest job, or an empty text."""
        listed = self.run("squeue", "-h", "-t", "all", "-o", "%A %j").splitlines()
        numbers = [int(line.split()[0]) for line in listed if f" orrery-{run}-" in line]
        return str(max(numbers)) if numbers else ""

    def jobs_of(self, run: str) -> list[str]:
        """States of all jobs of the run, the oldest first."""
        listed = self.run("squeue", "-h", "-t", "all", "-S", "i", "-o", "%T %j").splitlines()
        return [line.split()[0] for line in listed if f" orrery-{run}-" in line]

    def state_of(self, job: str) -> str:
        """The job's state in Slurm's words."""
        return self.run("squeue", "-h", "-t", "all", "-j", job, "-o", "%T")

    def until(self, condition: object, what: str, seconds: float = 90) -> None:
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            if condition():  # type: ignore[operator]
                return
            time.sleep(0.1)
        raise AssertionError(f"{what}: not within {seconds} s\n{self.logs()}")

    def logs(self) -> str:
        paths = sorted(self.folder.glob("*.log"))
        return "\n".join(f"--- {path.name}\n{path.read_text()[-1500:]}" for path in paths)

    def close(self) -> None:
        """End all jobs first: slurmd outlives a controller whose tasks ignore SIGTERM."""
        for server in self.rest:
            server.terminate()
            server.wait(10)
        with contextlib.suppress(Exception):
            for user in ("root", USER):
                self.run("scancel", "--full", "--signal=KILL", f"--user={user}")
                self.run("scancel", f"--user={user}")
            self.until(lambda: not self.run("squeue", "-h"), "no job", seconds=10)
        for name in ("slurmd.n1", "slurmd.n2", "slurmctld", "slurmdbd", "munged"):
            self._end(name, signal.SIGTERM)
        if self.database is not None:
            self.database.terminate()
            self.database.wait(60)

    def _answers(self) -> bool:
        with contextlib.suppress(AssertionError, subprocess.TimeoutExpired):
            self.run("squeue", "-h")
            return True
        return False

    def _end(self, name: str, number: int) -> None:
        with contextlib.suppress(FileNotFoundError, ProcessLookupError, ValueError):
            pid = int((self.folder / f"{name}.pid").read_text())
            os.kill(pid, number)
            for _ in range(300):
                os.kill(pid, 0)
                time.sleep(0.1)
            os.kill(pid, signal.SIGKILL)
