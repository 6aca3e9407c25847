"""Allocations, jobs in other engines, lease, newest decision, guarantees and node windows."""

from __future__ import annotations

from django.db import models
from django.db.models import Q
from django.utils import timezone

from orchestrator.accounts.models import Team
from orchestrator.fleet.models import Device, Engine, Node, Pool
from orchestrator.runs.models import Attempt


class Allocation(models.Model):
    """A device held by an attempt from placement to exit; at most one is open per device.

    When a node is removed, its rows remain for accounting, with the names that they had.
    """

    attempt = models.ForeignKey(Attempt, on_delete=models.CASCADE, related_name="allocations")
    device = models.ForeignKey(
        Device, null=True, on_delete=models.SET_NULL, related_name="allocations"
    )
    # of a device that was removed with its node
    node_name = models.CharField(max_length=80, blank=True, default="", db_default="")
    device_index = models.PositiveSmallIntegerField(null=True, blank=True)
    pool_name = models.CharField(max_length=80, blank=True, default="", db_default="")
    rank = models.PositiveIntegerField()
    created = models.DateTimeField(default=timezone.now)
    released = models.DateTimeField(null=True, blank=True)

    class Meta:
        constraints = [
            models.UniqueConstraint(
                fields=["device"], condition=Q(released__isnull=True), name="device_held_once"
            )
        ]
        indexes = [
            models.Index(fields=["created"], name="allocation_created"),
            models.Index(fields=["released"], name="allocation_released"),
        ]

    def __str__(self) -> str:
        return f"{self.attempt_id} on {self.device_id}"


class EngineJob(models.Model):
    """The job of an attempt in another engine; its name identifies it, its number may be reused."""

    class State(models.TextChoices):
        """What the engine said at the newest contact."""

        UNSUBMITTED = "unsubmitted", "not submitted"
        PENDING = "pending", "pending"
        ACTIVE = "active", "active"
        ENDED = "ended", "ended"

    attempt = models.OneToOneField(Attempt, on_delete=models.CASCADE, related_name="engine_job")
    engine = models.ForeignKey(Engine, on_delete=models.CASCADE, related_name="jobs")
    name = models.CharField(max_length=120, unique=True)
    number = models.CharField(max_length=40, blank=True)  # the engine's id
    state = models.CharField(max_length=12, choices=State.choices, default=State.UNSUBMITTED)
    engine_state = models.CharField(max_length=40, blank=True)  # in the engine's words
    # the engine's verdict on the ended job; empty: only the supervisors know
    exit_class = models.CharField(max_length=16, blank=True)
    reason = models.CharField(max_length=300, blank=True)  # in the engine's words
    expected_start = models.DateTimeField(null=True, blank=True)
    # a submission began; without a number its result is unknown until a later listing
    tried = models.DateTimeField(null=True, blank=True)
    submitted = models.DateTimeField(null=True, blank=True)
    # not listed since then
    missing_since = models.DateTimeField(null=True, blank=True)
    ended = models.DateTimeField(null=True, blank=True)
    stop_sent = models.DateTimeField(null=True, blank=True)
    # stop the job: its attempt ended, or must be killed
    stop = models.BooleanField(default=False)
    hosts = models.JSONField(default=list)

    class Meta:
        indexes = [models.Index(fields=["engine", "state"], name="engine_job_state")]

    def __str__(self) -> str:
        return f"{self.name} ({self.number or 'not submitted'})"


class Lease(models.Model):
    """Holder of a named role until `expires`; then another process may take it."""

    name = models.CharField(max_length=40, primary_key=True)
    holder = models.CharField(max_length=80)
    expires = models.DateTimeField()
    beat = models.DateTimeField(null=True, blank=True)  # last completed pass, for /health/

    def __str__(self) -> str:
        return f"{self.name} held by {self.holder}"


class QueueDecision(models.Model):
    """The newest decision about the waiting runs, in one row; pages read it.

    `fingerprint` describes the input of the pass; an equal one needs no pass before `expires`.
    """

    name = models.CharField(max_length=20, primary_key=True)
    decided = models.DateTimeField()
    fingerprint = models.CharField(max_length=64, blank=True)
    expires = models.DateTimeField()
    waiting = models.PositiveIntegerField(default=0)
    reasons = models.JSONField(default=list)  # distinct texts
    # [[run, index of its reason, latest start in Unix seconds or null], …] in the queue's order
    waits = models.JSONField(default=list)
    # differs after each change; empty: stored by a release that did not write it
    revision = models.CharField(max_length=32, blank=True, default="", db_default="")

    def __str__(self) -> str:
        return f"{self.name} at {self.decided}"


class QueueEstimate(models.Model):
    """Simulated starts of the waiting runs, in one row; a job writes it, pages read it."""

    name = models.CharField(max_length=20, primary_key=True)
    computed = models.DateTimeField()
    # {run: [start, low, high, what would start it sooner]}, Unix seconds
    starts = models.JSONField(default=dict)

    def __str__(self) -> str:
        return f"{self.name} at {self.computed}"


class DeviceTime(models.Model):
    """Device-seconds of an ended attempt: `allocated` = `productive` + those lost by cause.

    `final`: late points can no longer change it, only a later attempt that repeats its steps.
    """

    attempt = models.OneToOneField(
        Attempt, on_delete=models.CASCADE, primary_key=True, related_name="device_time"
    )
    ended = models.DateTimeField()
    final = models.BooleanField(default=False)
    allocated = models.FloatField(default=0.0)
    productive = models.FloatField(default=0.0)
    queued = models.FloatField(default=0.0)  # before the allocation, not part of it
    startup = models.FloatField(default=0.0)
    trials = models.FloatField(default=0.0, db_default=0.0)  # of plans, before the run's steps
    restart = models.FloatField(default=0.0)
    hang = models.FloatField(default=0.0)
    node = models.FloatField(default=0.0)
    preemption = models.FloatField(default=0.0)

    class Meta:
        indexes = [
            models.Index(fields=["ended"], name="device_time_ended"),
            models.Index(fields=["ended"], condition=Q(final=False), name="device_time_not_final"),
        ]

    def __str__(self) -> str:
        return f"{self.attempt_id}: {self.productive:.0f} of {self.allocated:.0f} device-seconds"


class TeamGuarantee(models.Model):
    """Devices of a pool that a team gets when it needs them; others use them meanwhile."""

    pool = models.ForeignKey(Pool, on_delete=models.CASCADE, related_name="guarantees")
    team = models.ForeignKey(Team, on_delete=models.CASCADE, related_name="guarantees")
    devices = models.PositiveIntegerField()

    class Meta:
        constraints = [models.UniqueConstraint(fields=["pool", "team"], name="guarantee_pool_team")]

    def __str__(self) -> str:
        return f"{self.team_id} in {self.pool_id}: {self.devices}"


class NodeWindow(models.Model):
    """A time in which nodes of a pool take only the runs of one team, or none: maintenance.

    No run is placed that may last into it, unless it is the team's.
    """

    pool = models.ForeignKey(Pool, on_delete=models.CASCADE, related_name="windows")
    # empty: all nodes of the pool
    nodes = models.ManyToManyField(Node, related_name="windows", blank=True)
    team = models.ForeignKey(  # null: maintenance
        Team, null=True, blank=True, on_delete=models.CASCADE, related_name="windows"
    )
    reason = models.CharField(max_length=200, blank=True)
    start = models.DateTimeField()
    end = models.DateTimeField()
    created = models.DateTimeField(default=timezone.now)
    created_by = models.CharField(max_length=150, blank=True)

    class Meta:
        indexes = [models.Index(fields=["end"], name="node_window_end")]

    def __str__(self) -> str:
        return f"{self.pool_id} from {self.start} to {self.end}"
