"""Which attempt holds which device, and who runs the scheduler's loop.

Decisions are made in `policy`.
"""

from __future__ import annotations

from django.db import models
from django.db.models import Q
from django.utils import timezone

from orchestrator.fleet.models import Device
from orchestrator.runs.models import Attempt


class Allocation(models.Model):
    """A device held by an attempt, from placement until the attempt's exit.

    At most one open per device.
    """

    attempt = models.ForeignKey(Attempt, on_delete=models.CASCADE, related_name="allocations")
    device = models.ForeignKey(Device, on_delete=models.CASCADE, related_name="allocations")
    rank = models.PositiveIntegerField()
    created = models.DateTimeField(default=timezone.now)
    released = models.DateTimeField(null=True, blank=True)

    class Meta:
        constraints = [
            models.UniqueConstraint(
                fields=["device"], condition=Q(released__isnull=True), name="device_held_once"
            )
        ]
        indexes = [models.Index(fields=["created"], name="allocation_created")]

    def __str__(self) -> str:
        return f"{self.attempt_id} on {self.device_id}"


class Lease(models.Model):
    """One holder of a named duty, by token and expiry; the next takes over when it lapses."""

    name = models.CharField(max_length=40, primary_key=True)
    holder = models.CharField(max_length=80)
    expires = models.DateTimeField()
    beat = models.DateTimeField(null=True, blank=True)  # last completed pass, for /health/

    def __str__(self) -> str:
        return f"{self.name} held by {self.holder}"
