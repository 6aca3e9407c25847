"""Responses about runs: attempts, events, files, series, experiments, the queue."""

from __future__ import annotations

from typing import Any

from ninja import Schema
from pydantic import ConfigDict, Field

from orchestrator.api.schemas.base import Id, PageOf, Time
from workers.contracts.wire.samples import WrittenText


class DeviceTimeOut(Schema):
    """Device-seconds of ended attempts: `allocated_s` = `productive_s` + the sum of `lost_s`."""

    allocated_s: float = Field(description="devices times the time from placement to the end")
    productive_s: float
    lost_s: dict[str, float] = Field(
        description="by cause: startup, trials, restart, hang, node, preemption"
    )
    queued_s: float = Field(description="devices times the wait in the queue; not allocated")
    final: bool = Field(description="false while late points may still change it")


class SizeOut(Schema):
    """One number of devices on which an elastic run may train, with the same global batch."""

    devices: int
    dp: int
    accumulation: int = Field(description="micro-batches per rank and step")
    step_time_s: float | None = Field(description="predicted; null if unknown")
    total_bytes: float | None = Field(description="predicted peak memory per device")
    fits: bool | None


class ElasticOut(Schema):
    """The range of devices of an elastic run."""

    min_devices: int
    max_devices: int
    devices: int | None = Field(description="devices that it holds now; null while it holds none")
    sizes: list[SizeOut] = Field(description="largest first")


class CheckOut(Schema):
    """What a submission of a spec would do; nothing is created."""

    problems: list[dict[str, Any]] = Field(description="wrong fields, as in a refusal")
    misfits: list[dict[str, Any]] = Field(description="what `force` overrides")
    advice: list[str] = Field(description="single changes with which the plan would fit")
    plan: dict[str, Any] | None = Field(description="resolved; null with problems")
    automatic: bool | None = Field(description="whether the planner chose the plan")
    how: str | None = Field(description="how the plan was chosen")
    fits: bool | None
    prediction: dict[str, Any] | None
    sizes: list[SizeOut] = Field(description="of an elastic run, largest first")
    possible_sizes: list[int] = Field(
        description="numbers of devices that `resources.min_devices` could allow; empty if fixed"
    )


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
    devices: int = Field(
        description="devices it uses, of an elastic run at most; 0 for external runs"
    )
    elastic: ElasticOut | None = Field(description="null for a run with a fixed size")
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
    devices: int = Field(description="number of devices of the placement")
    resize: dict[str, Any] | None = Field(
        description="{cause, reason, by?} if an elastic run was asked to continue with another size"
    )
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


class ExperimentOut(Schema):
    """A question and the runs that answer it."""

    id: Id
    name: str
    hypothesis: str
    notes: str
    owner: str
    pinned: list[str]
    created: Time


class QueueOut(Schema):
    """A waiting run."""

    run: str
    name: str
    owner: str
    devices: int
    min_devices: int | None = Field(
        description="fewest devices of an elastic run; null for a fixed size"
    )
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


class CurvesOut(Schema):
    """Several metrics over one axis, in the order of the request."""

    items: list[SeriesOut]


class Rejected(Schema):
    """An item that was not stored."""

    index: int = Field(description="position in the request")
    message: str


class IngestOut(Schema):
    """How many items were stored, were known, or were rejected."""

    accepted: int
    duplicates: int
    rejected: list[Rejected]
