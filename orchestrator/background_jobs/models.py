"""The schedule of each job, and one row per run of a job."""

from __future__ import annotations

from django.conf import settings
from django.db import models
from django.utils import timezone


class Job(models.Model):
    """When a job is due, and the lease of its run in progress."""

    name = models.CharField(max_length=40, primary_key=True)
    next_run = models.DateTimeField(default=timezone.now)
    lease = models.CharField(max_length=32, blank=True)  # empty: no run in progress
    lease_until = models.DateTimeField(null=True, blank=True)
    fails = models.PositiveIntegerField(default=0)  # in a row
    ok_total = models.BigIntegerField(default=0)
    failed_total = models.BigIntegerField(default=0)
    last_ended = models.DateTimeField(null=True, blank=True)

    def __str__(self) -> str:
        return self.name


class JobRun(models.Model):
    """One run of a job. A frequent job records only runs that changed something or failed."""

    class State(models.TextChoices):
        """States; the last two are final."""

        QUEUED = "queued", "queued"
        RUNNING = "running", "running"
        OK = "ok", "ok"
        FAILED = "failed", "failed"

    name = models.CharField(max_length=40)
    state = models.CharField(max_length=8, choices=State.choices, default=State.QUEUED)
    dry_run = models.BooleanField(default=False)
    attempt = models.PositiveIntegerField(default=1)
    requested_by = models.ForeignKey(
        settings.AUTH_USER_MODEL, null=True, blank=True, on_delete=models.SET_NULL, related_name="+"
    )
    created = models.DateTimeField(default=timezone.now)
    due = models.DateTimeField(default=timezone.now)  # queued: when its message is sent next
    started = models.DateTimeField(null=True, blank=True)
    ended = models.DateTimeField(null=True, blank=True)
    counts = models.JSONField(default=dict)  # what changed → how many
    error = models.CharField(max_length=500, blank=True)

    class Meta:
        indexes = [
            models.Index(fields=["name", "-id"], name="job_run_name"),
            models.Index(fields=["state"], name="job_run_state"),
            models.Index(fields=["created"], name="job_run_created"),
        ]

    def __str__(self) -> str:
        return f"{self.name}#{self.pk} {self.state}"


class Subscription(models.Model):
    """Where a user receives which messages. Target and signing secret are encrypted."""

    owner = models.ForeignKey(
        settings.AUTH_USER_MODEL, on_delete=models.CASCADE, related_name="subscriptions"
    )
    name = models.CharField(max_length=80)
    channel = models.CharField(max_length=8)  # webhook | slack | email
    scope = models.CharField(max_length=8)  # own | team
    events = models.JSONField(default=list)
    target = models.TextField()
    host = models.CharField(max_length=255)  # shown in place of the target
    secret = models.TextField(blank=True)  # of webhooks
    created = models.DateTimeField(default=timezone.now)

    def __str__(self) -> str:
        return f"{self.name} ({self.channel})"


class Delivery(models.Model):
    """One message of a subscription; `key` names its cause, so it is created once."""

    class State(models.TextChoices):
        """States; the last two are final."""

        WAITING = "waiting", "waiting"
        SENT = "sent", "sent"
        FAILED = "failed", "failed"

    subscription = models.ForeignKey(
        Subscription, on_delete=models.CASCADE, related_name="deliveries"
    )
    key = models.CharField(max_length=120)
    event = models.CharField(max_length=20)
    body = models.JSONField()
    state = models.CharField(max_length=8, choices=State.choices, default=State.WAITING)
    tries = models.PositiveIntegerField(default=0)
    next_try = models.DateTimeField(default=timezone.now)
    error = models.CharField(max_length=300, blank=True)
    created = models.DateTimeField(default=timezone.now)
    sent = models.DateTimeField(null=True, blank=True)

    class Meta:
        constraints = [
            models.UniqueConstraint(fields=["subscription", "key"], name="delivery_once")
        ]
        indexes = [models.Index(fields=["state", "next_try"], name="delivery_due")]

    def __str__(self) -> str:
        return f"{self.event} {self.state}"


class Position(models.Model):
    """How far a job has read events. `safe` follows `seen` after a minute: ids commit late."""

    name = models.CharField(max_length=40, primary_key=True)
    seen = models.BigIntegerField(default=0)
    safe = models.BigIntegerField(default=0)
    moved = models.DateTimeField(default=timezone.now)

    def __str__(self) -> str:
        return f"{self.name}>{self.safe}"


class Export(models.Model):
    """An archive of a run or experiment that a job builds; its file is deleted when it expires."""

    class State(models.TextChoices):
        """States; the last two are final."""

        QUEUED = "queued", "queued"
        READY = "ready", "ready"
        FAILED = "failed", "failed"

    owner = models.ForeignKey(
        settings.AUTH_USER_MODEL, on_delete=models.CASCADE, related_name="exports"
    )
    kind = models.CharField(max_length=12)  # run | experiment
    target = models.BigIntegerField()
    state = models.CharField(max_length=8, choices=State.choices, default=State.QUEUED)
    created = models.DateTimeField(default=timezone.now)
    finished = models.DateTimeField(null=True, blank=True)
    expires = models.DateTimeField()
    bytes = models.BigIntegerField(default=0)
    error = models.CharField(max_length=300, blank=True)

    class Meta:
        indexes = [models.Index(fields=["state"], name="export_state")]

    def __str__(self) -> str:
        return f"{self.kind} {self.target} {self.state}"


class Simulation(models.Model):
    """Scheduling policies compared on a trace; a job runs it."""

    class State(models.TextChoices):
        """States; the last two are final."""

        QUEUED = "queued", "queued"
        DONE = "done", "done"
        FAILED = "failed", "failed"

    owner = models.ForeignKey(
        settings.AUTH_USER_MODEL, on_delete=models.CASCADE, related_name="simulations"
    )
    trace = models.CharField(max_length=120)  # philly:RUNS:SEED, or a file's name
    csv = models.TextField(blank=True)  # the text of an uploaded file
    runs = models.PositiveIntegerField()
    nodes = models.PositiveIntegerField()
    devices_per_node = models.PositiveIntegerField()
    policies = models.JSONField(default=list)  # names
    state = models.CharField(max_length=8, choices=State.choices, default=State.QUEUED)
    created = models.DateTimeField(default=timezone.now)
    finished = models.DateTimeField(null=True, blank=True)
    result = models.JSONField(null=True, blank=True)  # of compare_with_charts
    error = models.CharField(max_length=500, blank=True)

    class Meta:
        indexes = [models.Index(fields=["state"], name="simulation_state")]

    def __str__(self) -> str:
        return f"{self.trace} {self.state}"


class UsageDay(models.Model):
    """Device-seconds that a person's runs held in a pool on a UTC day.

    Names are stored, so reports outlive users and pools. `owner` 0: a day without usage.
    """

    day = models.DateField()
    owner = models.BigIntegerField()
    person = models.CharField(max_length=150, blank=True)
    teams = models.JSONField(default=list)  # names, when it was measured
    pool = models.CharField(max_length=80, blank=True)
    device_s = models.FloatField(default=0.0)
    productive_s = models.FloatField(default=0.0)  # of attempts that have ended
    lost_s = models.FloatField(default=0.0)
    attempts = models.PositiveIntegerField(default=0)
    # of devices whose power was measured
    energy_j = models.FloatField(default=0.0, db_default=0.0)
    final = models.BooleanField(default=False)

    class Meta:
        constraints = [
            models.UniqueConstraint(fields=["day", "owner", "pool"], name="usage_day_once")
        ]

    def __str__(self) -> str:
        return f"{self.day} {self.person} {self.pool}"
