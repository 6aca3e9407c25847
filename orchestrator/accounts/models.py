"""People, teams, API tokens, audit entries and idempotency keys. Knows nothing of runs or nodes."""

from __future__ import annotations

from django.contrib.auth.models import AbstractUser
from django.db import models
from django.utils import timezone

from orchestrator.accounts.roles import Role


class User(AbstractUser):
    role = models.CharField(max_length=16, choices=Role.choices, default=Role.SUBMITTER)
    must_change_password = models.BooleanField(default=False)

    @property
    def is_operator(self) -> bool:
        return self.role in (Role.OPERATOR, Role.ADMIN) or self.is_superuser


class Team(models.Model):
    name = models.CharField(max_length=80, unique=True)
    members = models.ManyToManyField(User, related_name="teams", blank=True)

    def __str__(self) -> str:
        return self.name


class ApiToken(models.Model):
    """A bearer token.

    Only its SHA-256 is stored; `prefix` is what people see to tell tokens apart.
    """

    user = models.ForeignKey(User, on_delete=models.CASCADE, related_name="tokens")
    name = models.CharField(max_length=80)
    prefix = models.CharField(max_length=12)
    digest = models.CharField(max_length=64, unique=True)
    # of roles.SCOPES; never more than the user's role allows
    scopes = models.JSONField(default=list)
    created = models.DateTimeField(default=timezone.now)
    expires = models.DateTimeField(null=True, blank=True)
    last_used = models.DateTimeField(null=True, blank=True)
    revoked = models.DateTimeField(null=True, blank=True)

    def __str__(self) -> str:
        return f"{self.name} ({self.prefix}…)"


class AuditEntry(models.Model):
    """Who did what to which thing, when, from where. Only ever appended."""

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
    """The answer that a creating POST gave, so that the same key and body get it again."""

    user = models.ForeignKey(User, on_delete=models.CASCADE, related_name="+")
    key = models.CharField(max_length=200)
    route = models.CharField(max_length=120)
    body_digest = models.CharField(max_length=64)
    # null while the first call is still at work
    status = models.PositiveSmallIntegerField(null=True)
    answer = models.JSONField(null=True)
    created = models.DateTimeField(default=timezone.now, db_index=True)

    class Meta:
        constraints = [
            models.UniqueConstraint(fields=["user", "route", "key"], name="idempotency_once")
        ]

    def __str__(self) -> str:
        return f"{self.route} {self.key}"
