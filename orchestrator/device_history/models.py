"""Tables of packed readings (`packing`), of idle devices, and of what attempts used per hour."""

from __future__ import annotations

from django.db import models

from orchestrator.fleet.models import Device, Node
from orchestrator.runs.models import Attempt


class NodeReadings(models.Model):
    """Points of a node and its devices: the minutes of a quarter hour, or the quarters of a day.

    `open`: the newest row of minutes, whose quarter hour is not summarized yet.
    """

    node = models.ForeignKey(Node, on_delete=models.CASCADE, related_name="+", db_index=False)
    step_s = models.PositiveIntegerField()  # 60 | 900
    start = models.BigIntegerField()  # Unix seconds
    open = models.BooleanField(default=False)
    data = models.BinaryField()

    class Meta:
        verbose_name_plural = "node readings"
        constraints = [
            models.UniqueConstraint(fields=["node", "step_s", "start"], name="node_readings_once")
        ]
        indexes = [
            models.Index(fields=["step_s", "start"], name="node_readings_start"),
            models.Index(fields=["node"], condition=models.Q(open=True), name="node_readings_open"),
        ]

    def __str__(self) -> str:
        return f"{self.node_id} every {self.step_s} s from {self.start}"


class PoolReadings(models.Model):
    """The same of all devices of a pool in sums; `pool` is a name, so rows outlive pools."""

    pool = models.CharField(max_length=80)
    step_s = models.PositiveIntegerField()
    start = models.BigIntegerField()
    open = models.BooleanField(default=False)
    last = models.BigIntegerField(default=0)  # start of the newest point, Unix seconds
    data = models.BinaryField()

    class Meta:
        verbose_name_plural = "pool readings"
        constraints = [
            models.UniqueConstraint(fields=["pool", "step_s", "start"], name="pool_readings_once")
        ]
        indexes = [models.Index(fields=["step_s", "start"], name="pool_readings_start")]

    def __str__(self) -> str:
        return f"{self.pool} every {self.step_s} s from {self.start}"


class AttemptHour(models.Model):
    """What an attempt's devices did within an hour; seconds and joules are sums over devices.

    `read_s`: with readings; `idle_s` and `busy_s` (utilization times seconds) are parts of it;
    `measured_s`: with a power reading, from which `energy_j` is.
    """

    attempt = models.ForeignKey(Attempt, on_delete=models.CASCADE, related_name="+", db_index=False)
    hour = models.BigIntegerField()  # Unix seconds
    read_s = models.FloatField(default=0.0)
    idle_s = models.FloatField(default=0.0)
    busy_s = models.FloatField(default=0.0)
    measured_s = models.FloatField(default=0.0)
    energy_j = models.FloatField(default=0.0)

    class Meta:
        constraints = [
            models.UniqueConstraint(fields=["attempt", "hour"], name="attempt_hour_once")
        ]
        indexes = [models.Index(fields=["hour"], name="attempt_hour_hour")]

    def __str__(self) -> str:
        return f"{self.attempt_id} at {self.hour}: {self.energy_j:.0f} J"


class IdleDevice(models.Model):
    """An allocated device whose utilization has stayed below the limit since a time."""

    device = models.OneToOneField(
        Device, on_delete=models.CASCADE, primary_key=True, related_name="+"
    )
    attempt = models.ForeignKey(Attempt, on_delete=models.CASCADE, related_name="+")
    since = models.DateTimeField()

    def __str__(self) -> str:
        return f"{self.device_id} since {self.since}"
