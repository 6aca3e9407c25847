"""Sweeps and their trials. Only `services` and `advance` change states."""

from __future__ import annotations

from django.conf import settings
from django.db import models
from django.utils import timezone

from orchestrator.runs.models import Experiment, Run


class SweepState(models.TextChoices):
    """A sweep runs until its budget is used, it is cancelled, or it cannot give results."""

    RUNNING = "running"
    FINISHED = "finished"
    FAILED = "failed"
    CANCELLED = "cancelled"


class TrialState(models.TextChoices):
    """State of one point of a sweep; the run has its own."""

    RUNNING = "running"  # the run waits, starts or trains
    PAUSED = "paused"  # at a rung or an interval, with a checkpoint and without devices
    FINISHED = "finished"  # the run finished and has a value
    STOPPED = "stopped"  # ended early: worse than others, replaced, or cancelled
    FAILED = "failed"  # the run failed, or has no finite value
    REFUSED = "refused"  # the spec with these parameters cannot be submitted


class Sweep(models.Model):
    """A search over parameters of a spec: the parent of its trials' runs."""

    name = models.CharField(max_length=120)
    owner = models.ForeignKey(
        settings.AUTH_USER_MODEL, on_delete=models.PROTECT, related_name="sweeps"
    )
    experiment = models.ForeignKey(
        Experiment, null=True, blank=True, on_delete=models.SET_NULL, related_name="sweeps"
    )
    definition = models.JSONField()  # `definition.SweepDefinition`
    state = models.CharField(
        max_length=10, choices=SweepState.choices, default=SweepState.RUNNING.value
    )
    message = models.CharField(max_length=500, blank=True)  # why it ended
    created = models.DateTimeField(default=timezone.now)
    ended = models.DateTimeField(null=True, blank=True)

    class Meta:
        indexes = [
            models.Index(fields=["state", "id"], name="sweep_state"),
            models.Index(fields=["owner", "-id"], name="sweep_owner"),
        ]

    def __str__(self) -> str:
        return f"{self.pk} {self.name}"


class Trial(models.Model):
    """One point of a sweep and the run that measures it."""

    sweep = models.ForeignKey(Sweep, on_delete=models.CASCADE, related_name="trials")
    number = models.PositiveIntegerField()  # counts per sweep, from 1
    run = models.OneToOneField(
        Run, null=True, blank=True, on_delete=models.SET_NULL, related_name="trial"
    )
    # PBT: the trial whose checkpoint this one continues, and the member of the population
    parent = models.ForeignKey(
        "self", null=True, blank=True, on_delete=models.SET_NULL, related_name="children"
    )
    member = models.PositiveIntegerField(default=0)
    parameters = models.JSONField()  # path → value
    state = models.CharField(
        max_length=10, choices=TrialState.choices, default=TrialState.RUNNING.value
    )
    message = models.CharField(max_length=500, blank=True)
    rung = models.PositiveIntegerField(default=0)  # rungs or intervals with a result
    results = models.JSONField(default=list)  # value per rung
    value = models.FloatField(null=True, blank=True)  # of the metric; null: none, or not finite
    step = models.PositiveIntegerField(default=0)  # of the value
    created = models.DateTimeField(default=timezone.now)
    ended = models.DateTimeField(null=True, blank=True)

    class Meta:
        constraints = [models.UniqueConstraint(fields=["sweep", "number"], name="trial_once")]

    def __str__(self) -> str:
        return f"{self.sweep_id}/{self.number}"
