"""Reports, their versions, frozen panels, comments and share links."""

from __future__ import annotations

from django.conf import settings
from django.db import models
from django.utils import timezone


class Report(models.Model):
    """A document about runs. `head` is the number of its newest version; every change raises it."""

    title = models.CharField(max_length=160)  # of the newest version
    owner = models.ForeignKey(
        settings.AUTH_USER_MODEL, on_delete=models.PROTECT, related_name="reports"
    )
    head = models.PositiveIntegerField(default=1)
    created = models.DateTimeField(default=timezone.now)
    updated = models.DateTimeField(default=timezone.now)

    class Meta:
        indexes = [models.Index(fields=["owner", "-updated"], name="report_owner_updated")]

    def __str__(self) -> str:
        return f"{self.pk} {self.title}"


class ReportVersion(models.Model):
    """The title and text as someone saved them; never altered."""

    report = models.ForeignKey(Report, on_delete=models.CASCADE, related_name="versions")
    number = models.PositiveIntegerField()  # from 1
    title = models.CharField(max_length=160)
    text = models.TextField(blank=True)  # Markdown
    note = models.CharField(max_length=200, blank=True)  # what changed
    author = models.ForeignKey(
        settings.AUTH_USER_MODEL, on_delete=models.PROTECT, related_name="report_versions"
    )
    restored = models.PositiveIntegerField(null=True)  # the version that this one repeats
    created = models.DateTimeField(default=timezone.now)

    class Meta:
        constraints = [
            models.UniqueConstraint(fields=["report", "number"], name="report_version_once")
        ]

    def __str__(self) -> str:
        return f"{self.report_id}@{self.number}"


class FrozenPanel(models.Model):
    """The data of a frozen block as they were when a version first had it; never altered.

    Later versions with the same block show the same data.
    """

    report = models.ForeignKey(Report, on_delete=models.CASCADE, related_name="frozen")
    key = models.CharField(max_length=64)  # of the block, `blocks.block_key`
    data = models.JSONField()  # what the block draws
    runs = models.JSONField(default=list)  # ids of the runs that the data are of
    by = models.ForeignKey(settings.AUTH_USER_MODEL, on_delete=models.PROTECT, related_name="+")
    created = models.DateTimeField(default=timezone.now)

    class Meta:
        constraints = [models.UniqueConstraint(fields=["report", "key"], name="frozen_panel_once")]

    def __str__(self) -> str:
        return f"{self.report_id}:{self.key[:8]}"


class ReportComment(models.Model):
    """A comment, or an answer to one; a resolved comment closes its answers too."""

    report = models.ForeignKey(Report, on_delete=models.CASCADE, related_name="comments")
    parent = models.ForeignKey(
        "self", null=True, blank=True, on_delete=models.CASCADE, related_name="answers"
    )
    author = models.ForeignKey(
        settings.AUTH_USER_MODEL, on_delete=models.PROTECT, related_name="report_comments"
    )
    version = models.PositiveIntegerField()  # that the author read
    text = models.TextField()  # Markdown
    created = models.DateTimeField(default=timezone.now)
    resolved = models.DateTimeField(null=True)
    resolved_by = models.ForeignKey(
        settings.AUTH_USER_MODEL, null=True, on_delete=models.SET_NULL, related_name="+"
    )

    class Meta:
        indexes = [models.Index(fields=["report", "id"], name="report_comment_order")]

    def __str__(self) -> str:
        return f"{self.report_id}:{self.pk}"


class ShareLink(models.Model):
    """A link that shows a report without a login until it expires or is revoked.

    Its address is signed with the server's key; the database alone does not hold it.
    """

    report = models.ForeignKey(Report, on_delete=models.CASCADE, related_name="links")
    author = models.ForeignKey(
        settings.AUTH_USER_MODEL, on_delete=models.CASCADE, related_name="report_links"
    )
    nonce = models.CharField(max_length=32, unique=True)  # 128 random bits
    note = models.CharField(max_length=120, blank=True)  # for whom
    created = models.DateTimeField(default=timezone.now)
    expires = models.DateTimeField()
    revoked = models.DateTimeField(null=True)
    last_opened = models.DateTimeField(null=True)  # to the minute

    class Meta:
        indexes = [models.Index(fields=["report", "-id"], name="share_link_of_report")]

    def __str__(self) -> str:
        return f"{self.report_id}:{self.pk}"
