"""A real Slurm cluster of two nodes on loopback ports: munged, slurmctld and two slurmd.

Needs root and Debian's packages munge and slurm-wlm; everything is in one temporary folder.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import signal
import socket
import subprocess
import time
from pathlib import Path

from tests.flows.embedded import free_port

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "squeue")
_PATH = "/usr/sbin:/usr/bin:/sbin:/bin"
_CONF = """\
ClusterName=t
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={ports[0]}
SlurmUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket,cred_expire=5
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
SlurmdTimeout=10
KillWait=8
MinJobAge=300
MessageTimeout=3
NodeName=n1 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[1]} CPUs=4
NodeName=n2 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[2]} CPUs=4
PartitionName=low Nodes=n1,n2 Default=YES MaxTime=60 State=UP
PartitionName=secret Nodes=n1,n2 AllowGroups=daemon State=UP
"""


def is_possible() -> bool:
    """Whether this machine has what the cluster needs."""
    return os.geteuid() == 0 and all(shutil.which(name, path=_PATH) for name in PROGRAMS)


class SlurmCluster:
    """Start it, then give `conf` to Slurm's commands as SLURM_CONF."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.conf = folder, folder / "slurm.conf"
        self.environ = {"PATH": _PATH, "SLURM_CONF": str(self.conf), "LANG": "C.UTF-8"}

    def start(self) -> None:
        for name in ("state", "spool.n1", "spool.n2"):
            (self.folder / name).mkdir(parents=True)
        host = socket.gethostname().partition(".")[0]
        ports = [free_port() for _ in range(3)]
        self.conf.write_text(_CONF.format(folder=self.folder, host=host, ports=ports))
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
        self.start_controller()
        for node in ("n1", "n2"):
            self.run("slurmd", "-N", node)
        self.until(lambda: self.run("sinfo", "-h", "-p", "low", "-o", "%F") == "0/2/0/2", "idle")

    def start_controller(self) -> None:
        self.run("slurmctld")
        self.until(self._answers, "slurmctld answers")

    def kill_controller(self) -> None:
        self._end("slurmctld", signal.SIGKILL)

    def run(self, *words: str) -> str:
        """The output of a command, which must succeed."""
        done = subprocess.run(
            words, env=self.environ, capture_output=True, text=True, timeout=30, cwd="/"
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

    def until(self, condition: object, what: str, seconds: float = 30) -> None:
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
        with contextlib.suppress(Exception):
            self.run("scancel", "--full", "--signal=KILL", "--user=root")
            self.run("scancel", "--user=root")
            self.until(lambda: not self.run("squeue", "-h"), "no job", seconds=10)
        for name in ("slurmd.n1", "slurmd.n2", "slurmctld", "munged"):
            self._end(name, signal.SIGTERM)

    def _answers(self) -> bool:
        with contextlib.suppress(AssertionError, subprocess.TimeoutExpired):
            self.run("squeue", "-h")
            return True
        return False

    def _end(self, name: str, number: int) -> None:
        with contextlib.suppress(FileNotFoundError, ProcessLookupError, ValueError):
            pid = int((self.folder / f"{name}.pid").read_text())
            os.kill(pid, number)
            for _ in range(50):
                os.kill(pid, 0)
                time.sleep(0.1)
            os.kill(pid, signal.SIGKILL)
