"""Experiments, runs, attempts and their objects. Only `states` changes states."""

from __future__ import annotations

import uuid

from django.conf import settings
from django.db import models
from django.utils import timezone

from workers.contracts.wire.node_messages import AttemptState, ExitClass, RunState


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
    attempt_number = models.PositiveIntegerField(default=0)
    wait_reason = models.CharField(max_length=300, blank=True)
    # cancel | pause, requested by a user, pending
    requested = models.CharField(max_length=12, blank=True)
    budgets_used = models.JSONField(default=dict)  # exit class → attempts used
    not_before = models.DateTimeField(null=True, blank=True)  # back-off between attempts
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
    nodes_exited = models.JSONField(default=dict)  # node name → its exit report
    created = models.DateTimeField(default=timezone.now)
    dispatched = models.DateTimeField(null=True, blank=True)
    launched = models.DateTimeField(null=True, blank=True)  # first supervisor up
    started = models.DateTimeField(null=True, blank=True)  # ranks running
    ended = models.DateTimeField(null=True, blank=True)

    class Meta:
        constraints = [models.UniqueConstraint(fields=["run", "number"], name="attempt_run_number")]
        indexes = [models.Index(fields=["state"], name="attempt_state")]

    def __str__(self) -> str:
        return f"{self.run_id}.{self.number}"


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

    class Meta:
        constraints = [models.UniqueConstraint(fields=["run", "name"], name="artifact_once")]

    def __str__(self) -> str:
        return f"{self.run_id}/{self.name}"
