"""Tables of what programs record about themselves, and of media."""

from __future__ import annotations

from django.db import models
from django.utils import timezone

from orchestrator.runs.models import Run


class RunDetails(models.Model):
    """Configuration, summary and origin of a run, as its program recorded them."""

    run = models.OneToOneField(Run, on_delete=models.CASCADE, related_name="details")
    config = models.JSONField(default=dict)
    summary = models.JSONField(default=dict)
    # {command: [text], folder, host, python, commit, branch, remote, dirty}, each optional
    program = models.JSONField(default=dict)
    diff = models.TextField(blank=True)  # of the program's repository to its commit
    requirements = models.TextField(blank=True)  # one `name==version` per line
    updated = models.DateTimeField(default=timezone.now)

    class Meta:
        verbose_name_plural = "run details"

    def __str__(self) -> str:
        return f"details of run {self.run_id}"


class MediaBlob(models.Model):
    """The bytes of an image, once per run."""

    run = models.ForeignKey(
        Run, on_delete=models.CASCADE, related_name="media_blobs", db_index=False
    )
    digest = models.CharField(max_length=64)  # SHA-256
    content_type = models.CharField(max_length=20)  # image/png | image/jpeg
    width = models.PositiveIntegerField()
    height = models.PositiveIntegerField()
    bytes = models.PositiveIntegerField()
    data = models.BinaryField()

    class Meta:
        constraints = [models.UniqueConstraint(fields=["run", "digest"], name="media_blob_once")]

    def __str__(self) -> str:
        return f"{self.run_id} {self.digest[:12]}"


class MediaItem(models.Model):
    """One image, histogram, text or table; a repeated one of the same place replaces it."""

    run = models.ForeignKey(Run, on_delete=models.CASCADE, related_name="media", db_index=False)
    name = models.CharField(max_length=200)
    kind = models.CharField(max_length=10)  # image | histogram | text | table
    step = models.BigIntegerField()
    index = models.PositiveIntegerField(default=0)  # of several in one step
    caption = models.CharField(max_length=500, blank=True)
    time = models.FloatField()  # Unix seconds
    digest = models.CharField(max_length=64)  # of kind, content and caption
    body = models.JSONField(null=True)  # null: an image
    bytes = models.PositiveIntegerField(default=0)  # of the body; an image's are its blob's
    blob = models.ForeignKey(MediaBlob, null=True, on_delete=models.CASCADE, related_name="items")

    class Meta:
        constraints = [
            models.UniqueConstraint(fields=["run", "name", "step", "index"], name="media_item_once")
        ]

    def __str__(self) -> str:
        return f"{self.run_id} {self.name}@{self.step}"
