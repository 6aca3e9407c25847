"""Saved views of the runs table."""

from __future__ import annotations

from django.conf import settings
from django.db import models
from django.utils import timezone

from orchestrator.accounts.models import Team


class SavedView(models.Model):
    """The address of a view, by name, of a person or of a team."""

    owner = models.ForeignKey(
        settings.AUTH_USER_MODEL, on_delete=models.CASCADE, related_name="run_views"
    )
    team = models.ForeignKey(
        Team, null=True, blank=True, on_delete=models.CASCADE, related_name="run_views"
    )
    name = models.CharField(max_length=80)
    query = models.CharField(max_length=4000)  # of the URL, without "?"
    created = models.DateTimeField(default=timezone.now)

    class Meta:
        constraints = [models.UniqueConstraint(fields=["owner", "name"], name="saved_view_once")]

    def __str__(self) -> str:
        return self.name
