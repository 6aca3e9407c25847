"""Experiments, runs, attempts and their objects. Only `states` changes states."""

from __future__ import annotations

import uuid
from datetime import datetime
from typing import Any

from django.conf import settings
from django.db import models
from django.utils import timezone

from orchestrator.runs.code.models import ProgramSnapshot, RunCode
from orchestrator.runs.datasets.models import DataSetUse, DataSetVersion
from orchestrator.runs.plan_trials.models import PlanTrials
from orchestrator.runs.store.models import NodeStore, StoredCopy
from workers.contracts.exit_classes import ExitClass
from workers.contracts.specs.training_rules.elastic import plan_at
from workers.contracts.wire.node_messages import AttemptState, RunState

__all__ = [
    "Artifact",
    "Attempt",
    "AttemptShare",
    "Checkpoint",
    "DataSetUse",
    "DataSetVersion",
    "Deletion",
    "Experiment",
    "NodeStore",
    "PlanTrials",
    "ProgramSnapshot",
    "Run",
    "RunCode",
    "RunEvent",
    "RunSecret",
    "RunTag",
    "StoredCopy",
    "StoredFolder",
]


def _choices(enum: type) -> list[tuple[str, str]]:
    return [(member.value, member.value) for member in enum]  # type: ignore[attr-defined]


class Experiment(models.Model):
    """A question and the runs that answer it."""

    name = models.CharField(max_length=120, unique=True)
    hypothesis = models.TextField(blank=True)
    notes = models.TextField(blank=True)  # Markdown
    owner = models.ForeignKey(
        settings.AUTH_USER_MODEL, on_delete=models.PROTECT, related_name="experiments"
    )
    created = models.DateTimeField(default=timezone.now)
    pinned = models.JSONField(default=list)  # series names charted on the experiment's page

    def __str__(self) -> str:
        return self.name


class Run(models.Model):
    """One program of a kind with its spec, plan and state."""

    name = models.CharField(max_length=160)
    kind = models.CharField(max_length=16)
    state = models.CharField(
        max_length=12, choices=_choices(RunState), default=RunState.QUEUED.value
    )
    spec = models.JSONField()  # contracts RunSpec, as submitted
    plan = models.JSONField(null=True)  # contracts ParallelPlan, resolved
    model_name = models.CharField(max_length=120, blank=True)
    devices = models.PositiveIntegerField(default=0)  # requested; 0 for external runs
    # of an elastic run, largest first: [{devices, dp, accumulation, step_time_s, total_bytes,
    # fits}, …]
    sizes = models.JSONField(null=True, blank=True)
    pool_name = models.CharField(max_length=80, default="default")
    owner = models.ForeignKey(
        settings.AUTH_USER_MODEL, on_delete=models.PROTECT, related_name="runs"
    )
    experiment = models.ForeignKey(
        Experiment, null=True, blank=True, on_delete=models.SET_NULL, related_name="runs"
    )
    priority = models.IntegerField(default=0)
    notes = models.TextField(blank=True)
    created = models.DateTimeField(default=timezone.now)
    # start of the wait; reset on every re-queue
    queued_at = models.DateTimeField(default=timezone.now)
    started = models.DateTimeField(null=True, blank=True)
    ended = models.DateTimeField(null=True, blank=True)
    last_seen = models.DateTimeField(null=True, blank=True)  # newest point, event or log of the run
    # newest of these except points with only the machine's own numbers, see telemetry
    last_progress = models.DateTimeField(null=True, blank=True)
    attempt_number = models.PositiveIntegerField(default=0)
    wait_reason = models.CharField(max_length=300, blank=True)
    # cancel | pause, requested by a user, pending
    requested = models.CharField(max_length=12, blank=True)
    budgets_used = models.JSONField(default=dict)  # exit class → attempts used
    not_before = models.DateTimeField(null=True, blank=True)  # back-off between attempts
    # until then a run that changes its size is placed before others, on its smallest size
    keeps_place_until = models.DateTimeField(null=True, blank=True)
    exit = models.JSONField(null=True, blank=True)  # {class, reason, rank?, step?}
    prediction = models.JSONField(null=True, blank=True)
    # newest headline numbers: step, steps, loss, tokens_per_s, mfu, eta_s
    summary = models.JSONField(default=dict)
    # part of the ETag; every user edit raises it
    version = models.PositiveIntegerField(default=1)
    rewinds = models.JSONField(default=list)  # [[newest attempt at that time, step], …]
    forked_from = models.ForeignKey(
        "self", null=True, blank=True, on_delete=models.SET_NULL, related_name="forks"
    )

    class Meta:
        indexes = [
            models.Index(fields=["state", "-id"], name="run_state"),
            models.Index(fields=["owner", "-id"], name="run_owner"),
            # counts by state of a team's runs
            models.Index(fields=["owner", "state", "-id"], name="run_owner_state"),
            models.Index(fields=["experiment", "-id"], name="run_experiment"),
            models.Index(fields=["kind", "-id"], name="run_kind"),
            # orders of the runs table
            models.Index(fields=["name", "id"], name="run_name"),
            models.Index(fields=["model_name", "id"], name="run_model"),
            models.Index(fields=["created", "id"], name="run_created"),
            models.Index(fields=["started", "id"], name="run_started"),
            models.Index(fields=["ended", "id"], name="run_ended"),
        ]

    def __str__(self) -> str:
        return f"{self.id} {self.name}"


class RunTag(models.Model):
    """A tag of a run."""

    run = models.ForeignKey(Run, on_delete=models.CASCADE, related_name="tags")
    name = models.CharField(max_length=100)

    class Meta:
        constraints = [models.UniqueConstraint(fields=["run", "name"], name="run_tag_once")]
        indexes = [models.Index(fields=["name", "-run"], name="run_tag_name")]

    def __str__(self) -> str:
        return self.name


class RunSecret(models.Model):
    """A secret variable of a script's environment, encrypted (`submission.script_secrets`)."""

    run = models.ForeignKey(Run, on_delete=models.CASCADE, related_name="secrets")
    name = models.CharField(max_length=200)
    value = models.TextField()

    class Meta:
        constraints = [models.UniqueConstraint(fields=["run", "name"], name="run_secret_once")]

    def __str__(self) -> str:
        return f"{self.run_id} {self.name}"


class Attempt(models.Model):
    """One attempt to execute a run.

    Every message has its `fence`; a report with another fence is stale.
    """

    run = models.ForeignKey(Run, on_delete=models.CASCADE, related_name="attempts")
    number = models.PositiveIntegerField()
    fence = models.UUIDField(default=uuid.uuid4, unique=True)
    state = models.CharField(
        max_length=12, choices=_choices(AttemptState), default=AttemptState.ASSIGNED.value
    )
    exit_class = models.CharField(max_length=16, choices=_choices(ExitClass), blank=True)
    exit = models.JSONField(null=True, blank=True)  # {class, reason, rank?, step?, code?}
    placement = models.JSONField(default=list)  # [{node, address, devices: [index], node_rank}]
    resume_from = models.JSONField(null=True, blank=True)  # {path, step}
    # cancel | pause | preempt, sent to the nodes
    requested = models.CharField(max_length=12, blank=True)
    # of an elastic run that was asked to continue with another size: {cause, reason, by?}
    resize = models.JSONField(null=True, blank=True)
    # when the run entered the queue before this attempt
    queued = models.DateTimeField(null=True, blank=True)
    created = models.DateTimeField(default=timezone.now)
    dispatched = models.DateTimeField(null=True, blank=True)
    launched = models.DateTimeField(null=True, blank=True)  # first supervisor up
    started = models.DateTimeField(null=True, blank=True)  # ranks running
    ended = models.DateTimeField(null=True, blank=True)

    class Meta:
        constraints = [models.UniqueConstraint(fields=["run", "number"], name="attempt_run_number")]
        indexes = [
            models.Index(fields=["state"], name="attempt_state"),
            models.Index(fields=["ended"], name="attempt_ended"),
        ]

    def __str__(self) -> str:
        return f"{self.run_id}.{self.number}"

    @property
    def devices(self) -> int:
        """Devices of its placement; 0 before an engine has placed it."""
        return sum(len(share["devices"]) for share in self.placement)

    @property
    def in_engine(self) -> bool:
        """Whether it runs in a job of an engine, not under an agent."""
        return any("engine" in share for share in self.placement)

    @property
    def held_from(self) -> datetime | None:
        """When it got its devices: at its placement, or when its job left an engine's queue.

        None while such a job waits; it holds nothing.
        """
        return self.launched if self.in_engine else self.created

    @property
    def plan(self) -> dict[str, Any] | None:
        """The run's plan at the size of this attempt."""
        plan: dict[str, Any] | None = self.run.plan
        if plan is None or not self.run.sizes or not self.placement:
            return plan
        return plan_at(plan, self.devices)

    @property
    def nodes_exited(self) -> dict[str, dict[str, object]]:
        """Exit reports of nodes so far; reads prefetched `shares` if there are any."""
        return {
            share.node: share.exit or {}
            for share in self.shares.all()
            if share.state == AttemptState.EXITED
        }


class AttemptShare(models.Model):
    """The part of an attempt on one node."""

    attempt = models.ForeignKey(Attempt, on_delete=models.CASCADE, related_name="shares")
    node = models.CharField(max_length=80)
    state = models.CharField(
        max_length=12, choices=_choices(AttemptState), default=AttemptState.ASSIGNED.value
    )
    exit = models.JSONField(null=True, blank=True)  # the node's exit report

    class Meta:
        constraints = [models.UniqueConstraint(fields=["attempt", "node"], name="share_once")]
        indexes = [models.Index(fields=["node", "state"], name="share_node_state")]

    def __str__(self) -> str:
        return f"{self.attempt_id} on {self.node}"


class RunEvent(models.Model):
    """Something that happened, recorded once: a repeated `origin` is dropped."""

    run = models.ForeignKey(Run, on_delete=models.CASCADE, related_name="events")
    attempt = models.PositiveIntegerField(null=True)
    rank = models.IntegerField(null=True)
    seq = models.BigIntegerField()  # per run
    time = models.DateTimeField()
    type = models.CharField(max_length=60)
    data = models.JSONField(default=dict)
    # "<attempt>/<rank>/<seq of the rank>"; null: recorded by the control plane
    origin = models.CharField(max_length=80, null=True)

    class Meta:
        constraints = [
            models.UniqueConstraint(fields=["run", "seq"], name="event_run_seq"),
            models.UniqueConstraint(fields=["run", "origin"], name="event_run_origin"),
        ]

    def __str__(self) -> str:
        return f"{self.run_id}#{self.seq} {self.type}"


class Checkpoint(models.Model):
    """A saved training state."""

    run = models.ForeignKey(Run, on_delete=models.CASCADE, related_name="checkpoints")
    attempt = models.PositiveIntegerField()
    step = models.BigIntegerField()
    tokens = models.BigIntegerField(default=0)
    path = models.CharField(max_length=500)
    bytes = models.BigIntegerField(default=0)
    created = models.DateTimeField(default=timezone.now)
    deleted = models.DateTimeField(null=True, blank=True)
    # never deleted by garbage collection
    pinned = models.BooleanField(default=False, db_default=False)
    # in the store; of a fork's first checkpoint: its parent's
    copy = models.ForeignKey(
        StoredCopy, null=True, blank=True, on_delete=models.SET_NULL, related_name="checkpoints"
    )

    class Meta:
        constraints = [
            models.UniqueConstraint(fields=["run", "attempt", "step"], name="checkpoint_once")
        ]

    def __str__(self) -> str:
        return f"{self.run_id}@{self.step}"


class Artifact(models.Model):
    """A file that a run produced."""

    run = models.ForeignKey(Run, on_delete=models.CASCADE, related_name="artifacts")
    name = models.CharField(max_length=200)
    path = models.CharField(max_length=500)
    bytes = models.BigIntegerField(default=0)
    created = models.DateTimeField(default=timezone.now)
    copy = models.ForeignKey(
        StoredCopy, null=True, blank=True, on_delete=models.SET_NULL, related_name="artifacts"
    )

    class Meta:
        constraints = [models.UniqueConstraint(fields=["run", "name"], name="artifact_once")]

    def __str__(self) -> str:
        return f"{self.run_id}/{self.name}"


class Deletion(models.Model):
    """A path on a node that garbage collection deletes; `done` when the node has confirmed it."""

    node = models.CharField(max_length=80)
    run = models.BigIntegerField()
    kind = models.CharField(max_length=12)  # checkpoint | attempt
    path = models.CharField(max_length=500)
    created = models.DateTimeField(default=timezone.now)
    ordered = models.DateTimeField(null=True, blank=True)
    done = models.DateTimeField(null=True, blank=True)
    freed = models.BigIntegerField(default=0)  # bytes
    problem = models.CharField(max_length=300, blank=True)  # why it remains

    class Meta:
        constraints = [
            models.UniqueConstraint(
                fields=["node", "path"],
                condition=models.Q(done__isnull=True),
                name="deletion_open_once",
            )
        ]
        indexes = [models.Index(fields=["node", "done"], name="deletion_node")]

    def __str__(self) -> str:
        return f"{self.path} on {self.node}"


class StoredFolder(models.Model):
    """A folder below `runs/` on a node, by its newest scan; `orphan`: of no known run."""

    node = models.CharField(max_length=80)
    name = models.CharField(max_length=255)
    orphan = models.BooleanField(default=False)
    bytes = models.BigIntegerField(default=0)
    attempts = models.JSONField(default=dict)  # attempt folder → bytes without checkpoints
    modified = models.DateTimeField()
    seen = models.DateTimeField()

    class Meta:
        constraints = [models.UniqueConstraint(fields=["node", "name"], name="folder_once")]

    def __str__(self) -> str:
        return f"{self.name} on {self.node}"


class RunParameter(models.Model):
    """One value of a run's spec or plan, for filters, order and groups of the runs table."""

    run = models.ForeignKey(
        Run, on_delete=models.CASCADE, related_name="parameters", db_index=False
    )
    name = models.CharField(max_length=200)  # its path: train.optimizer.lr
    number = models.FloatField(null=True)  # of numbers
    text = models.CharField(max_length=200)  # of every value; "true" and "false"

    class Meta:
        constraints = [models.UniqueConstraint(fields=["run", "name"], name="run_parameter_once")]
        indexes = [
            models.Index(fields=["name", "number", "run"], name="run_parameter_number"),
            models.Index(fields=["name", "text", "run"], name="run_parameter_text"),
        ]

    def __str__(self) -> str:
        return f"{self.run_id} {self.name}={self.text}"


class ParameterName(models.Model):
    """A name that parameters of an owner's runs have, for completion without reading them all."""

    owner = models.ForeignKey(
        settings.AUTH_USER_MODEL, on_delete=models.CASCADE, related_name="+", db_index=False
    )
    name = models.CharField(max_length=200)

    class Meta:
        constraints = [
            models.UniqueConstraint(fields=["owner", "name"], name="parameter_name_once")
        ]

    def __str__(self) -> str:
        return self.name
