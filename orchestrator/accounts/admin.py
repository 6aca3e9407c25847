"""Users, teams, tokens and the audit log in Django's admin; tokens and audit are read-only."""

# Django's admin classes cannot be subscripted at run time
# mypy: disable-error-code="type-arg"

from __future__ import annotations

from django.contrib import admin
from django.contrib.auth.admin import UserAdmin
from django.http import HttpRequest

from orchestrator.accounts.models import (
    ApiToken,
    AuditEntry,
    IdempotencyKey,
    Team,
    TeamMembership,
    User,
)


@admin.register(User)
class PersonAdmin(UserAdmin):
    """Users with their role."""

    list_display = ("username", "role", "email", "is_active", "last_login")
    list_filter = ("role", "is_active", "teams")
    fieldsets = (
        *(UserAdmin.fieldsets or ()),
        ("Orrery", {"fields": ("role", "must_change_password")}),
    )
    add_fieldsets = (*UserAdmin.add_fieldsets, ("Orrery", {"fields": ("role",)}))


class MemberInline(admin.TabularInline):
    """Members of a team with their roles."""

    model = TeamMembership
    extra = 1
    autocomplete_fields = ("user",)


@admin.register(Team)
class TeamAdmin(admin.ModelAdmin):
    """Teams and their members."""

    list_display = ("name", "max_devices", "share", "budget_device_hours")
    search_fields = ("name",)
    inlines = (MemberInline,)


class ReadOnly(admin.ModelAdmin):
    """Rows that only services write."""

    def has_add_permission(self, request: HttpRequest) -> bool:
        """Never."""
        return False

    def has_change_permission(self, request: HttpRequest, obj: object = None) -> bool:
        """Never."""
        return False


@admin.register(ApiToken)
class TokenAdmin(ReadOnly):
    """API tokens, without their texts."""

    list_display = ("name", "prefix", "user", "created", "expires", "last_used", "revoked")
    list_select_related = ("user",)
    list_filter = ("revoked",)
    search_fields = ("name", "prefix", "user__username")


@admin.register(AuditEntry)
class AuditAdmin(ReadOnly):
    """The audit log."""

    list_display = ("time", "actor_name", "action", "target", "ip")
    list_filter = ("action",)
    search_fields = ("actor_name", "target")
    date_hierarchy = "time"
    show_full_result_count = False

    def has_delete_permission(self, request: HttpRequest, obj: object = None) -> bool:
        """Never."""
        return False


@admin.register(IdempotencyKey)
class IdempotencyAdmin(ReadOnly):
    """Idempotency keys."""

    list_display = ("route", "key", "user", "status", "created")
    list_select_related = ("user",)
