"""Messages between the control plane and a node: inventory, heartbeat, orders, reports, states.

Bodies only; `envelope` signs them and `names` has their queues and keys.
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
    """States of a run."""

    QUEUED = "queued"
    STARTING = "starting"
    RUNNING = "running"
    STOPPING = "stopping"
    PAUSED = "paused"
    FINISHED = "finished"
    FAILED = "failed"
    CANCELLED = "cancelled"


class AttemptState(StrEnum):
    """States of an attempt."""

    ASSIGNED = "assigned"
    LAUNCHING = "launching"
    RUNNING = "running"
    EXITED = "exited"


class ExitClass(StrEnum):
    """Why an attempt ended."""

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
    """One device of a node; `catalogue` is its name in the device catalogue, if known."""

    index: Count
    kind: Literal["gpu", "cpu"]
    name: str
    memory_bytes: Count
    uuid: str | None = None
    catalogue: str | None = None
    # of a CPU slot: its cores; of a GPU: the nearest cores of the node, if known
    cores: list[Count] | None = None


class DeviceSample(Contract):
    """A reading of one device; `utilization` is a fraction; null: the device does not report it."""

    index: Count
    utilization: float | None = None
    memory_used_bytes: Count | None = None
    power_w: float | None = None
    temperature_c: float | None = None
    processes: list[int] = []


class NodeInventory(Contract):
    """Hardware and software of a node.

    Peers reach it at `address`; `versions` has python, orrery, torch, driver.
    """

    name: NodeName
    address: str
    hostname: str
    cores: Positive
    memory_bytes: Count
    devices: list[DeviceInfo]
    versions: dict[str, str] = {}


class AttemptSeen(Contract):
    """An attempt whose supervisor is alive on the node."""

    fence: Fence
    state: AttemptState


class Heartbeat(Contract):
    """Periodic sign of life of a node, with samples of its devices and its attempts."""

    node: NodeName
    time: Time
    samples: list[DeviceSample] = []
    attempts: list[AttemptSeen] = []
    # sent at an agent's start and on request of a probe
    inventory: NodeInventory | None = None


class RankSlot(Contract):
    """The node and device of one rank."""

    rank: Count
    local_rank: Count
    node: NodeName
    device: Count


class ResumeFrom(Contract):
    """A checkpoint; `source` is the one that `path` is pinned from, for a fork's first attempt."""

    path: str
    step: Count
    source: str | None = None


class Rendezvous(Contract):
    """Rendezvous of torchrun's ranks; without a port the first node's supervisor publishes one."""

    host: str | None = None
    port: Annotated[int, Field(ge=1, le=65535)] | None = None


class LaunchOrder(Contract):
    """Start one attempt's ranks on one node.

    `run_dir` and `resume_from.path` are relative to the node's home. `rank_offset` is the node's
    first global rank; ranks are numbered over nodes in `node_rank` order.
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
    # a training run without progress of any rank for this time hangs
    hang_s: Annotated[float, Field(gt=0)] = 300.0
    rendezvous: Rendezvous = Rendezvous()


class ControlOrder(Contract):
    """Request an action of a running attempt; its ranks are killed after `grace_s` seconds."""

    attempt_id: Annotated[str, Field(coerce_numbers_to_str=True)]
    fence: Fence
    action: Literal["cancel", "pause", "preempt", "checkpoint", "profile", "memory", "kill"]
    grace_s: Annotated[float, Field(ge=0)] = 30.0


class ProbeOrder(Contract):
    """Request a node's inventory, or whether it still has these attempts.

    The node answers with a heartbeat and reports.
    """

    request: str
    fences: list[Fence] = []
    inventory: bool = False


class KeepOrder(Contract):
    """Pin the checkpoint `source` as `target`, so that its owner may delete it; both in `runs/`."""

    source: str
    target: str


class AttemptReport(Contract):
    """One numbered report of an attempt from one node.

    `data` of `exited`: `{class, reason, code?, rank?, step?, signal?}`; of `checkpoint`: `{step,
    tokens, path, bytes}`; of `artifact`: `{name, path, bytes}`; of `running`: `{ranks}`; of
    `event`: `{type, data, rank?}`.
    """

    attempt_id: Annotated[str, Field(coerce_numbers_to_str=True)]
    fence: Fence
    node: NodeName
    seq: Count
    time: Time
    type: Literal["launching", "running", "checkpoint", "artifact", "exited", "event"]
    data: dict[str, Any] = {}
