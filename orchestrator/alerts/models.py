"""Tables of rules, alerts and mutes."""

from __future__ import annotations

from django.conf import settings
from django.db import models
from django.utils import timezone

from orchestrator.runs.models import Run


class AlertRule(models.Model):
    """A user's rule about their runs, or about all runs that they see."""

    owner = models.ForeignKey(
        settings.AUTH_USER_MODEL, on_delete=models.CASCADE, related_name="alert_rules"
    )
    name = models.CharField(max_length=80)
    kind = models.CharField(max_length=12)
    metric = models.CharField(max_length=120, blank=True)
    operator = models.CharField(max_length=1, blank=True)  # < | >
    threshold = models.FloatField(null=True)
    state = models.CharField(max_length=12, blank=True)  # of kind state
    for_s = models.FloatField(default=0.0)  # how long the condition must hold
    query = models.CharField(max_length=2000, blank=True)  # which runs, as in the runs table
    scope = models.CharField(max_length=8, default="own")  # own | team
    enabled = models.BooleanField(default=True)
    created = models.DateTimeField(default=timezone.now)
    problem = models.CharField(max_length=300, blank=True)  # why it could not be evaluated

    def __str__(self) -> str:
        return self.name


class Alert(models.Model):
    """One rule about one run or node, from its begin to its end."""

    class State(models.TextChoices):
        """States; the last one is final."""

        PENDING = "pending", "pending"
        FIRING = "firing", "firing"
        RESOLVED = "resolved", "resolved"

    source = models.CharField(max_length=40)  # rule:ID, or a built-in rule's name
    rule = models.ForeignKey(AlertRule, null=True, on_delete=models.CASCADE, related_name="alerts")
    name = models.CharField(max_length=80)  # of the rule
    run = models.ForeignKey(Run, null=True, on_delete=models.CASCADE, related_name="alerts")
    node = models.CharField(max_length=80, blank=True)
    subject = models.CharField(max_length=100)  # run:ID or node:NAME
    state = models.CharField(max_length=8, choices=State.choices)
    message = models.CharField(max_length=300)
    value = models.FloatField(null=True)
    begun = models.DateTimeField()  # the condition holds since then
    fired = models.DateTimeField(null=True)
    resolved = models.DateTimeField(null=True)
    acknowledged = models.DateTimeField(null=True)
    acknowledged_by = models.ForeignKey(
        settings.AUTH_USER_MODEL, null=True, on_delete=models.SET_NULL, related_name="+"
    )

    class Meta:
        constraints = [
            models.UniqueConstraint(
                fields=["source", "subject"],
                condition=models.Q(resolved__isnull=True),
                name="alert_open_once",
            )
        ]
        indexes = [
            models.Index(fields=["state", "-id"], name="alert_state"),
            models.Index(fields=["fired"], name="alert_fired"),
            models.Index(fields=["resolved"], name="alert_resolved"),
        ]

    def __str__(self) -> str:
        return f"{self.name}: {self.subject} {self.state}"


class AlertMute(models.Model):
    """No messages of a rule for a person, about one run or all; `until` null: without an end."""

    owner = models.ForeignKey(
        settings.AUTH_USER_MODEL, on_delete=models.CASCADE, related_name="alert_mutes"
    )
    source = models.CharField(max_length=40)
    subject = models.CharField(max_length=100, blank=True)
    until = models.DateTimeField(null=True)

    class Meta:
        constraints = [
            models.UniqueConstraint(fields=["owner", "source", "subject"], name="alert_mute_once")
        ]

    def __str__(self) -> str:
        return f"{self.source} {self.subject}"
