"""Data sets and which runs use them. Only `register` and `services` write them."""

from __future__ import annotations

from django.conf import settings
from django.db import models
from django.utils import timezone


class DataSetVersion(models.Model):
    """One version of a data set: a file or folder as it was when it was registered.

    `deleted`: no run may use it any more; `removed`: its copy does not exist any more.
    """

    class State(models.TextChoices):
        """What is known: nothing yet, the fingerprint, a copy in the store too, or why neither."""

        WAITING = "waiting", "waiting"
        FINGERPRINTED = "fingerprinted", "fingerprinted"
        STORED = "stored", "stored"
        FAILED = "failed", "failed"

    name = models.CharField(max_length=80)
    version = models.PositiveIntegerField()
    owner = models.ForeignKey(
        settings.AUTH_USER_MODEL, on_delete=models.PROTECT, related_name="data_sets"
    )
    # below a data root, which every submitter may read; else only whom the owner shares runs with
    shared = models.BooleanField(default=True)
    path = models.CharField(max_length=4096)  # absolute, on the control plane
    folder = models.BooleanField(default=False)
    format = models.CharField(max_length=24)
    notes = models.TextField(blank=True)
    files = models.JSONField(default=dict)  # name → {bytes, sha256}
    fingerprint = models.CharField(max_length=64, blank=True, db_index=True)
    bytes = models.BigIntegerField(default=0)
    state = models.CharField(max_length=14, choices=State.choices, default=State.WAITING)
    problem = models.CharField(max_length=400, blank=True)
    hint = models.CharField(max_length=400, blank=True)
    retry_at = models.DateTimeField(null=True, blank=True)
    key = models.CharField(max_length=500, blank=True)  # of its copy, below the root of the store
    # the run whose output it is
    run = models.ForeignKey(
        "runs.Run", null=True, blank=True, on_delete=models.SET_NULL, related_name="registered_data"
    )
    created = models.DateTimeField(default=timezone.now)
    ready = models.DateTimeField(null=True, blank=True)  # since when the fingerprint is known
    deleted = models.DateTimeField(null=True, blank=True)
    removed = models.DateTimeField(null=True, blank=True)

    class Meta:
        constraints = [
            models.UniqueConstraint(fields=["name", "version"], name="data_set_version_once")
        ]
        indexes = [models.Index(fields=["state"], name="data_set_state")]

    def __str__(self) -> str:
        return self.label

    @property
    def label(self) -> str:
        """Its name in specs: `name@3`."""
        return f"{self.name}@{self.version}"

    @property
    def usable(self) -> bool:
        """Whether runs may use it."""
        known = (self.State.FINGERPRINTED, self.State.STORED)
        return self.deleted is None and self.state in known


class DataSetUse(models.Model):
    """A run that uses a data set; `use` is data, validation_data, prompts, references, seeds or
    excluded.
    """

    run = models.ForeignKey("runs.Run", on_delete=models.CASCADE, related_name="data_set_uses")
    data_set = models.ForeignKey(DataSetVersion, on_delete=models.PROTECT, related_name="uses")
    use = models.CharField(max_length=20)

    class Meta:
        constraints = [
            models.UniqueConstraint(fields=["run", "data_set", "use"], name="data_set_use_once")
        ]

    def __str__(self) -> str:
        return f"{self.run_id} uses {self.data_set_id}"
