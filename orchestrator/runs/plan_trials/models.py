"""The trials of a run with autotune: one row per run. Only `reports` and `submission` write it."""

from __future__ import annotations

from django.db import models


class PlanTrials(models.Model):
    """The plans to try, what was measured, and which plan was chosen."""

    run = models.OneToOneField(
        "runs.Run", primary_key=True, on_delete=models.CASCADE, related_name="plan_trials"
    )
    settings = models.JSONField()  # contracts Autotune, with defaults
    # [{plan, prediction}], by predicted step time
    candidates = models.JSONField()
    results = models.JSONField(default=dict)  # index → contracts TrialResult
    # of the attempt's trial that has not ended: attempt → index
    unfinished = models.JSONField(default=dict)
    # when the trials of an attempt began and ended (Unix seconds, null: not yet)
    periods = models.JSONField(default=dict)  # attempt → [began, ended]
    nodes = models.JSONField(default=list)  # that measured the results
    spent_s = models.FloatField(default=0.0)
    chosen = models.PositiveSmallIntegerField(null=True, blank=True)  # index
    reason = models.TextField(blank=True)
    decided = models.DateTimeField(null=True, blank=True)

    def __str__(self) -> str:
        return f"trials of {self.run_id}"
