"""What the planner remembers: calibrations, people's own devices, saved plans.

Knows no formula and no run.
"""

from __future__ import annotations

from django.conf import settings
from django.db import models
from django.utils import timezone


class Calibration(models.Model):
    """Parameters fitted to measured runs.

    The default one of a device kind is what predictions of runs rest on.
    """

    name = models.CharField(max_length=120, unique=True)
    device = models.CharField(max_length=120)  # catalogue name of most of its measurements
    framework = models.CharField(max_length=40)  # likewise
    document = models.JSONField()  # as `manage.py calibrate` writes it
    # the lines it was fitted to, to fit anew with more
    measurements = models.JSONField(default=list)
    rows = models.PositiveIntegerField()
    default = models.BooleanField(default=False)
    version = models.PositiveIntegerField(default=1)  # the ETag; every fit and edit raises it
    created_by = models.ForeignKey(
        settings.AUTH_USER_MODEL, on_delete=models.PROTECT, related_name="calibrations"
    )
    created = models.DateTimeField(default=timezone.now)
    fitted = models.DateTimeField(default=timezone.now)

    class Meta:
        constraints = [
            models.UniqueConstraint(
                fields=["device"], condition=models.Q(default=True), name="calibration_default_once"
            )
        ]

    def __str__(self) -> str:
        return self.name


class DeviceType(models.Model):
    """A device that the catalogue lacks, as its owner describes it; team mates may plan with it."""

    owner = models.ForeignKey(
        settings.AUTH_USER_MODEL, on_delete=models.CASCADE, related_name="device_types"
    )
    name = models.CharField(max_length=120)
    entry = models.JSONField()  # contracts.devices.Device
    created = models.DateTimeField(default=timezone.now)

    class Meta:
        constraints = [models.UniqueConstraint(fields=["owner", "name"], name="device_type_name")]

    def __str__(self) -> str:
        return self.name


class SavedPlan(models.Model):
    """A planner line that somebody wants to find again."""

    owner = models.ForeignKey(
        settings.AUTH_USER_MODEL, on_delete=models.CASCADE, related_name="saved_plans"
    )
    name = models.CharField(max_length=160)
    line = models.JSONField()  # a request line
    link = models.CharField(max_length=2000, blank=True)  # the planner page that shows it
    created = models.DateTimeField(default=timezone.now)

    def __str__(self) -> str:
        return self.name
