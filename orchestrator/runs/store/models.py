"""Copies in the store, and nodes whose copies the store refuses."""

from __future__ import annotations

from django.db import models
from django.utils import timezone


class StoredCopy(models.Model):
    """A complete copy of a checkpoint or artifact in the store.

    `deleted`: nothing may use it any more; `removed`: its objects do not exist any more.
    """

    run = models.ForeignKey("runs.Run", on_delete=models.CASCADE, related_name="copies")
    kind = models.CharField(max_length=12)  # checkpoint | artifact
    key = models.CharField(max_length=500, unique=True)  # below the root of the store
    bytes = models.BigIntegerField(default=0)
    fingerprint = models.CharField(max_length=64)
    created = models.DateTimeField(default=timezone.now)
    deleted = models.DateTimeField(null=True, blank=True)
    removed = models.DateTimeField(null=True, blank=True)

    def __str__(self) -> str:
        return self.key


class NodeStore(models.Model):
    """Why the copies of a node wait: the store refused them; removed when it takes one again."""

    node = models.CharField(max_length=80, unique=True)
    run = models.ForeignKey("runs.Run", on_delete=models.CASCADE, related_name="+")
    reason = models.CharField(max_length=16)  # full | credentials | bucket | unreachable | other
    message = models.CharField(max_length=400)
    hint = models.CharField(max_length=400)
    since = models.DateTimeField()

    def __str__(self) -> str:
        return f"{self.node}: {self.reason}"
