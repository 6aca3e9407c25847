"""What the control plane and a node say to each other: inventory, heartbeat, orders, reports, and
the words for states.

Bodies only; `envelope` signs them and `wire` names the ways they take.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Any, Literal

from pydantic import Field

from workers.contracts.base import Contract
from workers.contracts.specs.model import Count, Positive
from workers.contracts.wire.points import RunId, Time

Fence = Annotated[str, Field(min_length=1, max_length=64, coerce_numbers_to_str=True)]
NodeName = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,62}$")]


class RunState(StrEnum):
    QUEUED = "queued"
    STARTING = "starting"
    RUNNING = "running"
    STOPPING = "stopping"
    PAUSED = "paused"
    FINISHED = "finished"
    FAILED = "failed"
    CANCELLED = "cancelled"


class AttemptState(StrEnum):
    ASSIGNED = "assigned"
    LAUNCHING = "launching"
    RUNNING = "running"
    EXITED = "exited"


class ExitClass(StrEnum):
    OK = "ok"
    USER_ERROR = "user_error"
    OUT_OF_MEMORY = "out_of_memory"
    NUMERICS = "numerics"
    HANG = "hang"
    INFRASTRUCTURE = "infrastructure"
    PREEMPTED = "preempted"
    CANCELLED = "cancelled"
    LOST = "lost"


class DeviceInfo(Contract):
    """One device of a node; `catalogue` is its name in the device catalogue, where it is known."""

    index: Count
    kind: Literal["gpu", "cpu"]
    name: str
    memory_bytes: Count
    uuid: str | None = None
    catalogue: str | None = None
    # of a CPU slot: its cores; of a GPU: the node's cores nearest to it, where known
    cores: list[Count] | None = None


class DeviceSample(Contract):
    """A reading of one device; `utilization` is a fraction, what the device does not tell is null."""

    index: Count
    utilization: float | None = None
    memory_used_bytes: Count | None = None
    power_w: float | None = None
    temperature_c: float | None = None
    processes: list[int] = []


class NodeInventory(Contract):
    """What a node is made of.

    `address` is where its peers reach it; `versions` holds python, orrery, torch, driver.
    """

    name: NodeName
    address: str
    hostname: str
    cores: Positive
    memory_bytes: Count
    devices: list[DeviceInfo]
    versions: dict[str, str] = {}


class AttemptSeen(Contract):
    """An attempt whose supervisor the node sees alive."""

    fence: Fence
    state: AttemptState


class Heartbeat(Contract):
    node: NodeName
    time: Time
    samples: list[DeviceSample] = []
    attempts: list[AttemptSeen] = []
    # told at an agent's start and when asked for by a probe
    inventory: NodeInventory | None = None


class RankSlot(Contract):
    """Where one rank runs."""

    rank: Count
    local_rank: Count
    node: NodeName
    device: Count


class ResumeFrom(Contract):
    """`source` is the checkpoint that `path` is kept from, for the first attempt of a fork."""

    path: str
    step: Count
    source: str | None = None


class Rendezvous(Contract):
    """Where torchrun's ranks meet; without a port the first node's supervisor chooses one and
    publishes it.
    """

    host: str | None = None
    port: Annotated[int, Field(ge=1, le=65535)] | None = None


class LaunchOrder(Contract):
    """Start one attempt's share on one node. `run_dir` and `resume_from.path` are relative to the
    node's home.

    `rank_offset` is the node's first global rank; ranks count over nodes in `node_rank` order.
    """

    run: RunId
    run_name: str = ""
    kind: str
    attempt: Positive
    attempt_id: Annotated[str, Field(coerce_numbers_to_str=True)]
    fence: Fence
    spec: dict[str, Any]
    plan: dict[str, Any] | None = None
    node_rank: Count = 0
    nodes: Positive = 1
    local_devices: list[Count]
    local_ranks: Positive
    world_size: Positive
    rank_offset: Count = 0
    run_dir: str
    resume_from: ResumeFrom | None = None
    shared_dir: str | None = None
    device_kind: Literal["gpu", "cpu"] = "cpu"
    env: dict[str, str] = {}
    max_seconds: Annotated[float, Field(gt=0)] | None = None
    grace_s: Annotated[float, Field(ge=0)] = 30.0
    # a training run without progress of any rank for so long hangs
    hang_s: Annotated[float, Field(gt=0)] = 300.0
    rendezvous: Rendezvous = Rendezvous()


class ControlOrder(Contract):
    """Ask a running attempt for something; the ranks have `grace_s` seconds before the supervisor
    ends them.
    """

    attempt_id: Annotated[str, Field(coerce_numbers_to_str=True)]
    fence: Fence
    action: Literal["cancel", "pause", "preempt", "checkpoint", "profile", "memory", "kill"]
    grace_s: Annotated[float, Field(ge=0)] = 30.0


class ProbeOrder(Contract):
    """Ask a node for its inventory, or whether it still has these attempts; answered by a heartbeat
    and reports.
    """

    request: str
    fences: list[Fence] = []
    inventory: bool = False


class KeepOrder(Contract):
    """Keep the checkpoint `source` also as `target`, so that whoever wrote it may delete it; both
    under `runs/`.
    """

    source: str
    target: str


class AttemptReport(Contract):
    """One numbered piece of news of an attempt from one node.

    `data` of `exited`: `{class, reason, code?, rank?, step?, signal?}`; of `checkpoint`: `{step,
    tokens, path, bytes}`;
    of `artifact`: `{name, path, bytes}`; of `running`: `{ranks}`; of `event`: `{type, data,
    rank?}`.
    """

    attempt_id: Annotated[str, Field(coerce_numbers_to_str=True)]
    fence: Fence
    node: NodeName
    seq: Count
    time: Time
    type: Literal["launching", "running", "checkpoint", "artifact", "exited", "event"]
    data: dict[str, Any] = {}
