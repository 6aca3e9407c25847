"""Clusters, pools, nodes, devices and join tokens. `scheduling` assigns devices to attempts."""

from __future__ import annotations

from django.db import models
from django.utils import timezone


class Cluster(models.Model):
    """A group of nodes with a common network."""

    name = models.CharField(max_length=80, unique=True)

    def __str__(self) -> str:
        return self.name


class Pool(models.Model):
    """A named share of the fleet with its own quota and priority."""

    name = models.CharField(max_length=80, unique=True)
    max_devices_per_user = models.PositiveIntegerField(null=True, blank=True)
    priority = models.IntegerField(default=0)

    def __str__(self) -> str:
        return self.name


class Node(models.Model):
    """A machine with an agent."""

    class Health(models.TextChoices):
        """The node's health by the time since its last heartbeat."""

        UP = "up", "up"
        SILENT = "silent", "silent"  # no heartbeat for a while: unknown, not failed
        LOST = "lost", "lost"  # silent beyond the reaper's timeout

    name = models.CharField(max_length=80, unique=True)
    cluster = models.ForeignKey(Cluster, on_delete=models.PROTECT, related_name="nodes")
    pool = models.ForeignKey(Pool, on_delete=models.PROTECT, related_name="nodes")
    address = models.CharField(max_length=255)  # for connections from other nodes
    hostname = models.CharField(max_length=255, blank=True)
    health = models.CharField(max_length=8, choices=Health.choices, default=Health.UP)
    drained = models.BooleanField(default=False)
    drain_reason = models.CharField(max_length=200, blank=True)
    inventory = models.JSONField(default=dict)  # contract NodeInventory
    sample = models.JSONField(default=dict)  # newest device samples, from the last heartbeat
    # the secret is derived from token id and nonces, not stored
    join_token_id = models.CharField(max_length=32, blank=True)
    join_nonces = models.CharField(max_length=140, blank=True)
    joined = models.DateTimeField(default=timezone.now)
    last_heartbeat = models.DateTimeField(null=True, blank=True)

    def __str__(self) -> str:
        return self.name


class Device(models.Model):
    """One accelerator, or one CPU slot of a node without accelerators."""

    node = models.ForeignKey(Node, on_delete=models.CASCADE, related_name="devices")
    index = models.PositiveSmallIntegerField()
    kind = models.CharField(max_length=8)  # gpu | cpu
    name = models.CharField(max_length=120)
    # name in the device catalogue: h100-80g, cpu, ...
    catalogue = models.CharField(max_length=40, blank=True)
    memory_bytes = models.BigIntegerField(default=0)
    uuid = models.CharField(max_length=80, blank=True)
    healthy = models.BooleanField(default=True)

    class Meta:
        constraints = [models.UniqueConstraint(fields=["node", "index"], name="device_node_index")]

    def __str__(self) -> str:
        return f"{self.node_id}/{self.index}"


class JoinToken(models.Model):
    """Lets one node join, once. Its key is derived from the server's secret and never stored."""

    id = models.CharField(max_length=32, primary_key=True)
    pool = models.ForeignKey(Pool, on_delete=models.PROTECT, related_name="+")
    created = models.DateTimeField(default=timezone.now)
    created_by = models.CharField(max_length=150, blank=True)
    expires = models.DateTimeField()
    used = models.DateTimeField(null=True, blank=True)
    node = models.ForeignKey(
        Node, null=True, blank=True, on_delete=models.SET_NULL, related_name="+"
    )

    def __str__(self) -> str:
        return self.id
