"""The interface of a cluster engine: what the control plane requests of Slurm or Kubernetes.

`slurm` and `kubernetes` implement it. Pure data.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import Protocol

from workers.contracts.exit_classes import ExitClass


class EngineUnavailable(RuntimeError):
    """The engine did not answer; nothing is known, and nothing may be concluded."""


class SubmissionUnclear(RuntimeError):
    """The engine may have accepted the job: look it up by name before submitting again."""


class SubmissionRefused(RuntimeError):
    """The engine refuses the job permanently; `hint` says what to change."""

    def __init__(self, message: str, hint: str = "") -> None:
        super().__init__(message)
        self.hint = hint


class SubmissionDelayed(RuntimeError):
    """The engine takes no job now, for example because of a limit; a later pass tries again."""


@dataclass(frozen=True)
class Order:
    """A job to submit: `nodes` nodes with `per_node` devices each; `name` identifies it."""

    name: str
    run: int
    attempt: int
    owner: str
    nodes: int
    per_node: int
    gpu: bool
    ticket: str  # JobTicket.to_text
    pool: Mapping[str, object]  # settings of the pool
    max_seconds: float | None = None
    memory_gb: float | None = None
    cpus: float | None = None


@dataclass(frozen=True)
class JobView:
    """A job as the engine sees it; `phase` is pending, active or ended.

    `exit_class` is the engine's verdict on an ended job, None if only the supervisors know.
    """

    name: str
    number: str
    phase: str
    state: str
    reason: str = ""
    hosts: tuple[str, ...] = ()
    addresses: tuple[str, ...] = ()  # of the hosts, if the engine gives each job its own
    expected_start: datetime | None = None
    exit_class: ExitClass | None = None


@dataclass(frozen=True)
class Quota:
    """How much of a resource a queue uses, of its total if that is known."""

    resource: str
    used: float
    total: float | None = None


@dataclass(frozen=True)
class Partition:
    """What a partition or queue offers; times in seconds, None: no limit or not known.

    `waiting` and `running` count jobs.
    """

    name: str
    nodes: int = 0
    nodes_idle: int = 0
    cpus_per_node: int = 0
    gpus_per_node: int = 0
    gpu_type: str = ""
    memory_mb: int = 0
    limit_s: int | None = None
    up: bool = True
    waiting: int | None = None
    running: int | None = None
    quota: tuple[Quota, ...] = ()


@dataclass(frozen=True)
class Capacity:
    """The engine's partitions, and the addresses of its nodes by name."""

    version: str
    partitions: tuple[Partition, ...] = ()
    addresses: Mapping[str, str] = field(default_factory=dict)

    def partition(self, name: str) -> Partition | None:
        """The partition of this name."""
        return next((one for one in self.partitions if one.name == name), None)


class ClusterEngine(Protocol):
    """A scheduler outside Orrery. Every method raises EngineUnavailable if it does not answer."""

    @property
    def problem(self) -> str:
        """What an administrator should correct though the engine answers; empty: nothing."""

    def submit(self, order: Order) -> str:
        """The engine's number of the new job. Raises the Submission errors above."""

    def cancel(self, numbers: Collection[str], *, kill: bool = False) -> None:
        """End these jobs; those that have ended are ignored. `kill`: without time to save."""

    def watch(self) -> dict[str, JobView]:
        """All jobs that Orrery submitted and the engine still lists, by name, in one call."""

    def lookup(self, *, number: str, name: str) -> JobView | None:
        """A job that `watch` does not list; None if the engine does not remember it."""

    def capacity(self) -> Capacity:
        """Partitions and nodes."""

    def explain(self, view: JobView, pool: Mapping[str, object]) -> str:
        """One plain sentence why the job waits."""


def even_nodes(devices: int, per_node: int) -> tuple[int, int]:
    """`(nodes, devices per node)`: as few nodes as equal shares of at most `per_node` allow."""
    most = max(1, min(devices, per_node))
    share = next(number for number in range(most, 0, -1) if devices % number == 0)
    return devices // share, share
