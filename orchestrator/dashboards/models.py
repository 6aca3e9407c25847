"""The table of dashboards."""

from __future__ import annotations

from django.conf import settings
from django.db import models
from django.utils import timezone

from orchestrator.accounts.models import Team
from orchestrator.runs.models import Experiment, Run


class Dashboard(models.Model):
    """Panels of a run, an experiment or a team; of none of them: of its owner alone."""

    owner = models.ForeignKey(
        settings.AUTH_USER_MODEL, on_delete=models.CASCADE, related_name="dashboards"
    )
    run = models.ForeignKey(Run, null=True, on_delete=models.CASCADE, related_name="dashboards")
    experiment = models.ForeignKey(
        Experiment, null=True, on_delete=models.CASCADE, related_name="dashboards"
    )
    team = models.ForeignKey(Team, null=True, on_delete=models.CASCADE, related_name="dashboards")
    name = models.CharField(max_length=120)
    document = models.JSONField()  # spec.DashboardSpec
    version = models.PositiveIntegerField(default=1)  # raised by each edit
    created = models.DateTimeField(default=timezone.now)
    updated = models.DateTimeField(default=timezone.now)

    class Meta:
        constraints = [
            models.CheckConstraint(
                condition=models.Q(run=None, experiment=None)
                | models.Q(run=None, team=None)
                | models.Q(experiment=None, team=None),
                name="dashboard_one_subject",
            )
        ]

    def __str__(self) -> str:
        return self.name
