"""Tables of the planner: calibrations, own devices, saved plans.

Does not depend on formulas or runs.
"""

from __future__ import annotations

from django.conf import settings
from django.db import models
from django.utils import timezone


class Calibration(models.Model):
    """Parameters fitted to measured runs; runs are predicted with their device's default one."""

    name = models.CharField(max_length=120, unique=True)
    device = models.CharField(max_length=120)  # catalogue name of most of its measurements
    framework = models.CharField(max_length=40)  # likewise
    document = models.JSONField()  # as `manage.py calibrate` writes it
    # the lines it was fitted to, for a new fit with more lines
    measurements = models.JSONField(default=list)
    rows = models.PositiveIntegerField()
    default = models.BooleanField(default=False)
    version = models.PositiveIntegerField(default=1)  # the ETag; every fit and edit increments it
    created_by = models.ForeignKey(
        settings.AUTH_USER_MODEL, on_delete=models.PROTECT, related_name="calibrations"
    )
    created = models.DateTimeField(default=timezone.now)
    fitted = models.DateTimeField(default=timezone.now)

    class Meta:
        """Constraints."""

        constraints = [
            models.UniqueConstraint(
                fields=["device"], condition=models.Q(default=True), name="calibration_default_once"
            )
        ]

    def __str__(self) -> str:
        return self.name


class DeviceType(models.Model):
    """A device that is not in the catalogue; the owner's team may plan with it."""

    owner = models.ForeignKey(
        settings.AUTH_USER_MODEL, on_delete=models.CASCADE, related_name="device_types"
    )
    name = models.CharField(max_length=120)
    entry = models.JSONField()  # contracts.devices.Device
    created = models.DateTimeField(default=timezone.now)

    class Meta:
        """Constraints."""

        constraints = [models.UniqueConstraint(fields=["owner", "name"], name="device_type_name")]

    def __str__(self) -> str:
        return self.name


class SavedPlan(models.Model):
    """A saved request line."""

    owner = models.ForeignKey(
        settings.AUTH_USER_MODEL, on_delete=models.CASCADE, related_name="saved_plans"
    )
    name = models.CharField(max_length=160)
    line = models.JSONField()  # a request line
    link = models.CharField(max_length=2000, blank=True)  # the planner page that shows it
    created = models.DateTimeField(default=timezone.now)

    def __str__(self) -> str:
        return self.name
