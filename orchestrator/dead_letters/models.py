"""The table of dead letters."""

from __future__ import annotations

from django.db import models
from django.utils import timezone


class DeadLetterState(models.TextChoices):
    """What became of a dead letter."""

    OPEN = "open", "open"
    RETRIED = "retried", "retried"  # put back into its stream; opens again if it fails again
    DROPPED = "dropped", "dropped"


class DeadLetter(models.Model):
    """One message that was removed from its stream or queue, and why."""

    source = models.CharField(max_length=20)  # telemetry | reports | jobs
    node = models.CharField(max_length=80, blank=True)  # as the message claims
    code = models.CharField(max_length=40)  # stable reason, a label of /metrics
    reason = models.TextField()
    # empty if the message was larger than the service stores
    body = models.BinaryField(default=b"")
    size_bytes = models.PositiveBigIntegerField()
    digest = models.CharField(max_length=64)  # SHA-256 of the whole message
    written = models.FloatField(default=0)  # Unix seconds, by the broker's clock; 0 is unknown
    failures = models.PositiveIntegerField(default=1)
    state = models.CharField(
        max_length=8, choices=DeadLetterState.choices, default=DeadLetterState.OPEN
    )
    created = models.DateTimeField(default=timezone.now)
    updated = models.DateTimeField(default=timezone.now)

    class Meta:
        constraints = [
            models.UniqueConstraint(fields=["source", "digest"], name="dead_letter_once")
        ]
        indexes = [models.Index(fields=["source", "code", "state"], name="dead_letter_reason")]

    def __str__(self) -> str:
        return f"{self.source} {self.code} {self.digest[:8]}"
