"""Users, teams, API tokens, audit entries and idempotency keys."""

from __future__ import annotations

from django.contrib.auth.models import AbstractUser
from django.db import models
from django.utils import timezone

from orchestrator.accounts.roles import Role


class User(AbstractUser):
    """A user with a role."""

    role = models.CharField(max_length=16, choices=Role.choices, default=Role.SUBMITTER)
    must_change_password = models.BooleanField(default=False)

    @property
    def is_operator(self) -> bool:
        """Whether the user is an operator or admin."""
        return self.role in (Role.OPERATOR, Role.ADMIN) or self.is_superuser


class Team(models.Model):
    """Users who see each other's runs and experiments."""

    name = models.CharField(max_length=80, unique=True)
    members = models.ManyToManyField(
        User, related_name="teams", blank=True, through="TeamMembership"
    )
    # per calendar month (UTC); null: no budget
    budget_device_hours = models.FloatField(null=True, blank=True)
    # devices that its runs may hold at a time in all pools; null: no limit
    max_devices = models.PositiveIntegerField(null=True, blank=True)
    # weight of its fair share: a team of 2 may use twice as much as one of 1
    share = models.FloatField(default=1.0, db_default=1.0)

    def __str__(self) -> str:
        return self.name


class TeamMembership(models.Model):
    """A user in a team; the role is what the user may do with the team's runs and members."""

    team = models.ForeignKey(Team, on_delete=models.CASCADE, related_name="memberships")
    user = models.ForeignKey(User, on_delete=models.CASCADE, related_name="memberships")
    role = models.CharField(
        max_length=16,
        choices=Role.choices,
        default=Role.SUBMITTER,
        # the previous release inserts members without a role
        db_default=Role.SUBMITTER,
    )

    class Meta:
        db_table = "accounts_team_members"
        unique_together = [("team", "user")]

    def __str__(self) -> str:
        return f"{self.user_id} in {self.team_id}: {self.role}"


class ApiToken(models.Model):
    """A bearer token: stored as SHA-256; `prefix` identifies it to people."""

    user = models.ForeignKey(User, on_delete=models.CASCADE, related_name="tokens")
    name = models.CharField(max_length=80)
    prefix = models.CharField(max_length=12)
    digest = models.CharField(max_length=64, unique=True)
    # of roles.SCOPES, within the user's role
    scopes = models.JSONField(default=list)
    created = models.DateTimeField(default=timezone.now)
    expires = models.DateTimeField(null=True, blank=True)
    last_used = models.DateTimeField(null=True, blank=True)
    revoked = models.DateTimeField(null=True, blank=True)

    def __str__(self) -> str:
        return f"{self.name} ({self.prefix}…)"


class AuditEntry(models.Model):
    """Who did what to which object, when and from where. Append-only."""

    time = models.DateTimeField(default=timezone.now, db_index=True)
    actor = models.ForeignKey(
        User, null=True, blank=True, on_delete=models.SET_NULL, related_name="+"
    )
    actor_name = models.CharField(max_length=150)
    # "run.cancel", "token.create", "login", ...
    action = models.CharField(max_length=60, db_index=True)
    target = models.CharField(max_length=120, blank=True)  # "run:12"
    data = models.JSONField(default=dict)
    ip = models.GenericIPAddressField(null=True, blank=True)

    class Meta:
        verbose_name_plural = "audit entries"

    def __str__(self) -> str:
        return f"{self.actor_name} {self.action} {self.target}"


class IdempotencyKey(models.Model):
    """The stored response of a creating POST, for repeats with the same key and body."""

    user = models.ForeignKey(User, on_delete=models.CASCADE, related_name="+")
    key = models.CharField(max_length=200)
    route = models.CharField(max_length=120)
    body_digest = models.CharField(max_length=64)
    # null while the first request is in progress
    status = models.PositiveSmallIntegerField(null=True)
    answer = models.JSONField(null=True)
    created = models.DateTimeField(default=timezone.now, db_index=True)

    class Meta:
        constraints = [
            models.UniqueConstraint(fields=["user", "route", "key"], name="idempotency_once")
        ]

    def __str__(self) -> str:
        return f"{self.route} {self.key}"
