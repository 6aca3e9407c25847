"""Response schemas, one per resource. Times are ISO 8601 in UTC, sizes bytes, durations seconds."""

from __future__ import annotations

from datetime import datetime
from typing import Annotated, Any, Generic, Literal, TypeVar

from django.utils import timezone
from ninja import Schema
from pydantic import BeforeValidator, ConfigDict, Field, WithJsonSchema

from orchestrator.common.units import iso
from workers.contracts.wire.node_messages import Isolation
from workers.contracts.wire.samples import WrittenText

Item = TypeVar("Item")
Id = Annotated[str, BeforeValidator(str)]  # an integer as text
Time = Annotated[
    str,
    BeforeValidator(lambda time: iso(time) if isinstance(time, datetime) else time),
    WithJsonSchema({"type": "string", "format": "date-time"}),
]


class PageOf(Schema, Generic[Item]):
    """One page of a list; `next_cursor` is null on the last page."""

    items: list[Item]
    next_cursor: str | None = None


def aware(time: datetime | None) -> datetime | None:
    """The time with a time zone: UTC if it has none."""
    return (
        timezone.make_aware(time, timezone.get_default_timezone())
        if time and timezone.is_naive(time)
        else time
    )


class DeviceTimeOut(Schema):
    """Device-seconds of ended attempts: `allocated_s` = `productive_s` + the sum of `lost_s`."""

    allocated_s: float = Field(description="devices times the time from placement to the end")
    productive_s: float
    lost_s: dict[str, float] = Field(
        description="by cause: startup, restart, hang, node, preemption"
    )
    queued_s: float = Field(description="devices times the wait in the queue; not allocated")
    final: bool = Field(description="false while late points may still change it")


class RunOut(Schema):
    """A run: one program of a kind, with its spec, plan and state."""

    model_config = ConfigDict(extra="allow")

    id: Id = Field(description="the id in /api/v1/runs/{id}")
    name: str
    kind: str
    state: str = Field(
        description="queued, starting, running, stopping, paused, finished, failed or cancelled"
    )
    spec: dict[str, Any] = Field(
        description="as submitted, without defaults", json_schema_extra={"x-contract": "RunSpec"}
    )
    plan: dict[str, Any] | None = Field(
        description="the ParallelPlan it runs with; null for external runs"
    )
    attempt: int = Field(description="number of the newest attempt, 0 before the first")
    owner: str
    experiment: str | None
    created: Time
    started: Time | None
    ended: Time | None
    prediction: dict[str, Any] | None
    exit: dict[str, Any] | None = Field(description="{class, reason, rank?, step?} of an ended run")
    priority: int
    tags: list[str]
    notes: str
    devices: int = Field(description="devices it uses; 0 for external runs")
    wait_reason: str | None = Field(description="why a queued run waits")
    summary: dict[str, Any] = Field(
        description="newest headline numbers: step, steps, loss, tokens_per_s, mfu, eta_s"
    )
    forked_from: str | None
    version: int = Field(description="number of user edits; part of the ETag")
    device_time: DeviceTimeOut | None = Field(
        None, description="sum over ended attempts; only in the answer of GET runs/{id}"
    )


class AttemptOut(Schema):
    """One attempt to execute a run."""

    run: str
    attempt: int
    state: str
    exit_class: str | None
    exit: dict[str, Any] | None
    placement: list[dict[str, Any]] = Field(description="[{node, address, devices, node_rank}]")
    resume_from: dict[str, Any] | None
    created: Time
    launched: Time | None
    started: Time | None
    ended: Time | None
    device_time: DeviceTimeOut | None = Field(
        description="null until the attempt has ended and its last points have arrived"
    )


class EventOut(Schema):
    """Something that happened to a run."""

    run: str
    attempt: int
    rank: int | None
    seq: int = Field(description="counts per run")
    time: float = Field(description="Unix seconds")
    type: str
    data: dict[str, Any]


class StoredOut(Schema):
    """A complete copy in the store."""

    key: str = Field(description="folder below the store's URL")
    bytes: int
    fingerprint: str = Field(description="SHA-256 over names, sizes and digests of the files")
    created: Time


class CheckpointOut(Schema):
    """A saved training state."""

    id: Id
    run: str
    attempt: int
    step: int
    tokens: int
    path: str
    bytes: int
    created: Time
    deleted: Time | None
    pinned: bool = Field(description="never deleted by garbage collection")
    stored: StoredOut | None = Field(description="its copy in the store, if any")


class CodeFileOut(Schema):
    """A file of a program."""

    name: str = Field(description="relative to the program's folder")
    bytes: int
    link: str | None = Field(description="target of a link within the folder")


class EnvironmentOut(Schema):
    """The packages of a script run; below `node_packages` what the newest attempt reported."""

    lock: str | None = Field(description="a file of the work folder")
    modules: list[str]
    python: str | None = Field(description="a program on the PATH of the modules")
    node_packages: bool = Field(description="what the lock does not name comes from the node")
    fingerprint: str | None = Field(description="of the lock, Python and modules")
    python_version: str
    packages: list[str] = Field(description="installed, as name==version; at most 1,000")
    seconds: float | None = Field(description="time to prepare the packages")
    built: bool | None = Field(description="false: the node had installed them before")


class CodeOut(Schema):
    """The code of a script run at its submit."""

    fingerprint: str | None = Field(None, description="SHA-256 over all files; null: no code")
    git: bool = Field(False, description="the folder was in a git work tree")
    commit: str | None = None
    branch: str | None = None
    remote: str | None = Field(None, description="without credentials")
    submodules: dict[str, str] = Field({}, description="{folder: commit}")
    folder: str | None = Field(None, description="the original folder")
    start: str = Field("", description="the work folder below it")
    files: list[CodeFileOut] = []
    originals: list[str] = Field([], description="read from the original folder, such as data")
    notes: list[str] = Field([], description="what is not captured, and why")
    diff: str = Field("", description="changes since the commit, new program files included")
    environment: EnvironmentOut | None = Field(None, description="null: the node's packages")


class ArtifactOut(Schema):
    """A file that a run produced."""

    id: Id
    run: str
    name: str
    path: str
    bytes: int
    created: Time
    stored: StoredOut | None = Field(description="its copy in the store, if any")


class SamplesOut(Schema):
    """Texts that the model generated at one step."""

    step: int
    attempt: int | None
    time: Time
    samples: list[WrittenText] = Field(description="one generated text per prompt")
    temperature: float | None
    seconds: float | None
    cut_short: bool = Field(description="the time limit ended the generation")


class LogLine(Schema):
    """One line of a rank's output."""

    attempt: int
    rank: int = Field(description="-1: the supervisor's own lines")
    seq: int
    time: Time
    text: str
    cursor: str = Field(description="pass it as `after` to continue after this line")


class CompatibilityOut(Schema):
    """How far the versions of a node's agent and of the control plane differ."""

    skew: str = Field(
        description="same; minor: works, with a warning; refused: the node gets no new work"
    )
    message: str
    hint: str


class SupervisorsOut(Schema):
    """Supervisors of one release on a node."""

    release: str
    wire: str
    attempts: int
    skew: str


class DeviceOut(Schema):
    """An accelerator or a CPU slot of a node."""

    id: Id
    node: str
    index: int
    kind: str = Field(description="gpu or cpu")
    name: str
    catalogue: str | None = Field(description="its name in the device catalogue")
    memory_bytes: int
    uuid: str | None
    healthy: bool = Field(description="only healthy devices get work")
    problem: str | None = Field(description="why it is not healthy")
    slow: dict[str, Any] | None = Field(
        description="the newest gang that waited for it: run, attempt, rank, late_s per step, "
        "share of the time, and the number of such runs"
    )
    sample: dict[str, Any] | None = Field(
        description="the newest reading: utilization, memory, power, temperature, throttling"
    )


class CordonOut(Schema):
    """A node or device that gets no work until the cordon is lifted."""

    device: int | None = Field(description="index; null: the whole node")
    cause: str = Field(description="operator, failures, preflight or slow")
    reason: str
    data: dict[str, Any] = Field(description="measured numbers")
    created: Time
    created_by: str | None = Field(description="null: the control plane")
    lifted: Time | None
    lifted_by: str | None


class ProbeOut(Schema):
    """A rate that a preflight probe measured."""

    time: Time
    run: Id
    attempt: int
    measure: str = Field(description="matmul, memory, all_reduce_node or all_reduce")
    device: int | None = Field(description="index; null: a collective")
    ranks: int = Field(description="that shared the cores or the collective")
    value: float = Field(description="operations or bytes per second")
    ok: bool = Field(description="false: below the node's record")


class NodeProbeOut(Schema):
    """What a probe of an idle node measured for the planner; the newest of a day."""

    id: Id
    day: str
    state: str = Field(description="requested, done or failed")
    requested: Time
    requested_by: str | None = Field(description="null: the control plane")
    time: Time | None = Field(description="of the result; null: no result")
    message: str | None = Field(description="why the newest request of the day failed")
    version: int | None
    short: bool | None = Field(description="the probe before the first run")
    seconds: float | None
    ranks: int | None
    cores: int | None
    load: float | None = Field(description="share of the cores that other programs used before")
    versions: dict[str, str] | None
    link: dict[str, Any] | None
    rates: list[dict[str, Any]] = Field(
        description="{measure, setting, ranks, value, unit, seconds}"
    )
    steps: list[dict[str, Any]] = Field(description="training runs of a few steps")
    problems: list[str]


class SuspectOut(Schema):
    """Nodes to which the link is suspected: preflight probes of gangs with both were slow."""

    nodes: list[str]
    run: Id = Field(description="the run of the newest slow probe")
    time: Time
    all_reduce_bytes_per_s: float = Field(description="what that gang reached")


class NodeOut(Schema):
    """A machine of the fleet."""

    id: Id
    name: str
    cluster: str
    pool: str
    address: str
    hostname: str
    health: str = Field(description="up, silent (unknown, not failed) or lost")
    drained: bool
    drain_reason: str
    cordons: list[CordonOut] = Field(description="open ones of the node and its devices")
    joined: Time
    last_heartbeat: Time | None
    clock_skew_s: float = Field(description="the node's clock minus the control plane's")
    release: str = Field(description="release of the node's agent")
    wire: str = Field(description="wire protocol of the agent, major.minor; empty: unreadable")
    compatibility: CompatibilityOut
    supervisors: list[SupervisorsOut] = Field(
        description="supervisors of running attempts whose wire protocol is not the control plane's"
    )
    loss_held: bool = Field(
        description="overdue, but so many nodes are that an operator must confirm the loss"
    )
    dropped_orders: int = Field(
        default=0,
        description="unreadable messages that the agent dropped from its queue since it started",
    )
    cores: int | None
    memory_bytes: int | None
    versions: dict[str, str]
    isolation: Isolation | None = None
    broker_user: Literal["own", "shared"] | None = Field(
        default=None,
        description="the broker's user of the agent: its own, limited to the node's keys, or "
        "credentials that nodes share; null: release 0.1, shared",
    )
    devices: list[DeviceOut]
    suspect: SuspectOut | None = Field(None, description="only in the answer of GET nodes/{id}")


class PoolOut(Schema):
    """A named share of the fleet."""

    id: Id
    name: str
    max_devices_per_user: int | None
    priority: int
    node_count: int
    device_count: int = Field(description="healthy devices of nodes that accept work")


class ExperimentOut(Schema):
    """A question and the runs that answer it."""

    id: Id
    name: str
    hypothesis: str
    notes: str
    owner: str
    pinned: list[str]
    created: Time


class TokenOut(Schema):
    """An API token, without its text."""

    id: Id
    name: str
    prefix: str
    scopes: list[str]
    created: Time
    expires: Time | None
    last_used: Time | None
    revoked: Time | None


class NewTokenOut(TokenOut):
    """A created API token, with its text."""

    token: str = Field(description="shown only here; Orrery stores its digest")


class MeOut(Schema):
    """The authenticated caller."""

    id: Id
    username: str
    role: str
    scopes: list[str]
    teams: list[str]
    token: str | None = Field(description="name of this call's token; null for a session")


class AuditOut(Schema):
    """An entry of the audit log."""

    id: Id
    time: Time
    actor: str
    action: str
    target: str
    data: dict[str, Any]
    ip: str | None

    @staticmethod
    def resolve_actor(entry: Any) -> str:
        """The name of the user, also after the user was deleted."""
        return str(entry.actor_name)


class QueueOut(Schema):
    """A waiting run."""

    run: str
    name: str
    owner: str
    devices: int
    pool: str
    priority: int
    queued_at: Time
    position: int = Field(description="1 starts next")
    reason: str = Field(description="why it waits")
    may_start: Time | None = Field(description="estimated start; null if unknown")
    earliest_start: Time | None = Field(description="80% of simulated starts lie between")
    latest_start: Time | None
    sooner: str = Field(description="what would start it sooner, empty if nothing is known")


class SeriesName(Schema):
    """A metric of a run."""

    name: str
    unit: str
    ranks: list[int]
    attempts: list[int]
    points: int = Field(description="over all ranks and attempts")


class SeriesNames(PageOf[SeriesName]):
    """The metrics that a run has so far."""


Number = float | str  # non-finite numbers are "NaN", "Infinity", "-Infinity"


class SeriesOut(Schema):
    """A metric over an axis, downsampled."""

    name: str
    unit: str
    rank: int | None
    attempt: int | None = Field(description="the newest attempt among the points")
    axis: str
    x: list[Number]
    y: list[Number]
    low: list[Number] | None = Field(
        None, description="if downsampled: the minimum of each point's bucket"
    )
    high: list[Number] | None = Field(None, description="if downsampled: the maximum")
    total_points: int
    last_seq: int


class Rejected(Schema):
    """An item that was not stored."""

    index: int = Field(description="position in the request")
    message: str


class IngestOut(Schema):
    """How many items were stored, were known, or were rejected."""

    accepted: int
    duplicates: int
    rejected: list[Rejected]


class Preset(Schema):
    """A model preset."""

    name: str
    parameters: int | None = None
    spec: dict[str, Any]


class PresetsOut(Schema):
    """What a spec can name."""

    models: list[Preset]
    devices: list[dict[str, Any]]
    data: list[str]


class CalibrationOut(Schema):
    """Parameters of the planner, fitted to measurements."""

    id: Id
    name: str
    device: str = Field(description="catalogue name in most of its measurements")
    framework: str
    rows: int = Field(description="number of measurements")
    default: bool = Field(description="used for predictions of runs on its device")
    created_by: str
    created: Time
    fitted: Time
    version: int
    document: dict[str, Any] | None = Field(
        None, description="in the format of `manage.py calibrate`; null in lists"
    )


class DeviceTypeOut(Schema):
    """A user-defined device type."""

    id: Id
    name: str
    owner: str
    created: Time
    entry: dict[str, Any] = Field(json_schema_extra={"x-contract": "Device"})


class SavedPlanOut(Schema):
    """A plan request saved under a name."""

    id: Id
    name: str
    owner: str
    created: Time
    line: dict[str, Any] = Field(description="a request line for plans/estimate")
    link: str | None


class EstimateOut(Schema):
    """An estimate; with `explain`, numbers are trees `{name, value, unit, formula, inputs,
    source}`.
    """

    model_config = ConfigDict(extra="allow")

    id: Any = None
    ok: bool = Field(True, description="the plan is legal")
    problems: list[dict[str, str]] = Field(
        [], description="[{field, message, hint}] of an illegal plan"
    )
    fits: bool | None = None
    memory: dict[str, Any] | None = Field(
        None, description="bytes by category on the worst pipeline rank, and totals"
    )
    host: dict[str, Any] | None = Field(
        None, description="bytes that offloading places in host memory, per device"
    )
    step_time_s: Any = None
    step_time_low_s: Any = Field(None, description="with step_time_high_s, an 80% interval")
    step_time_high_s: Any = None
    time: dict[str, Any] | None = None
    tokens_per_s_per_device: Any = None
    tflops_per_device: Any = Field(None, description="model FLOPs")
    mfu: Any = None
    hfu: Any = None
    bubble_fraction: Any = None
    comm: dict[str, Any] | None = Field(
        None, description="bytes per device and step, by kind of parallelism"
    )
    collectives: dict[str, Any] | None = Field(
        None,
        description=("bytes that a rank passes to each kind of collective; null if not counted"),
    )
    notes: list[str] = Field([], description="what to know before you use the plan")
    explained: dict[str, Any] | None = Field(
        None, description="trees of the numbers named in `explain`"
    )
    usd_per_billion_tokens: Any = None
    days: Any = Field(None, description="for workload.tokens; null without it")
    calibration: str | None = None
    answers: list[dict[str, Any]] | None = Field(None, description="one per line of `requests`")


class SearchOut(Schema):
    """The best plans of a search."""

    model_config = ConfigDict(extra="allow")

    enumerated: int = Field(description="legal candidates")
    legal: int
    fit: int
    seconds: float
    plans: list[dict[str, Any]] = Field(description="[{plan, …the estimate}], best first")
    pareto: list[int] = Field(description="positions in `plans`")
    rejected: dict[str, int] = Field(description="number of excluded plans by reason")
    notes: list[str] = Field(
        [], description="what the search excluded, and what to know about its plans"
    )
    closest: dict[str, Any] | None = Field(
        None, description="if nothing fits: the plan that needs the least memory"
    )
    advice: list[dict[str, Any]] | None = Field(
        None, description="if nothing fits: single changes that would make a plan fit"
    )


class ExportOut(Schema):
    """A plan in another engine's configuration format."""

    engine: str
    filename: str
    text: str
    notes: list[str]


class ServingOut(Schema):
    """Predicted performance of serving a model."""

    model_config = ConfigDict(extra="allow")
