"""The code of script runs, as rows. Only `record` writes it."""

from __future__ import annotations

from django.db import models
from django.utils import timezone


class ProgramSnapshot(models.Model):
    """The files of a program (`workers.contracts` `ProgramFiles`), once per fingerprint."""

    fingerprint = models.CharField(max_length=64, unique=True)
    packed = models.BinaryField()
    files = models.PositiveIntegerField()
    bytes = models.BigIntegerField()
    created = models.DateTimeField(default=timezone.now)

    def __str__(self) -> str:
        return self.fingerprint[:12]


class RunCode(models.Model):
    """The code of a script run at its submit; without git the fields of git are empty."""

    run = models.OneToOneField("runs.Run", on_delete=models.CASCADE, related_name="code")
    snapshot = models.ForeignKey(ProgramSnapshot, on_delete=models.PROTECT, related_name="runs")
    folder = models.CharField(max_length=4096)  # the original one
    start = models.CharField(max_length=1000, blank=True)  # the work folder below it
    originals = models.JSONField(default=list)
    git = models.BooleanField(default=False)
    commit = models.CharField(max_length=64, blank=True)
    branch = models.CharField(max_length=200, blank=True)
    remote = models.CharField(max_length=500, blank=True)
    submodules = models.JSONField(default=dict)  # name → commit
    diff = models.BinaryField(default=bytes)
    notes = models.JSONField(default=list)

    def __str__(self) -> str:
        return f"{self.run_id} {self.commit[:12] or self.snapshot_id}"
