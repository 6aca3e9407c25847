"""Tables of device allocations and of the scheduler's lease."""

from __future__ import annotations

from django.db import models
from django.db.models import Q
from django.utils import timezone

from orchestrator.fleet.models import Device
from orchestrator.runs.models import Attempt


class Allocation(models.Model):
    """A device held by an attempt from placement to exit; at most one is open per device."""

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
    """Holder of a named role until `expires`; then another process may take it."""

    name = models.CharField(max_length=40, primary_key=True)
    holder = models.CharField(max_length=80)
    expires = models.DateTimeField()
    beat = models.DateTimeField(null=True, blank=True)  # last completed pass, for /health/

    def __str__(self) -> str:
        return f"{self.name} held by {self.holder}"
