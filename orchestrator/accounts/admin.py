"""People, teams, tokens and the audit log in Django's admin.

Tokens and audit entries cannot be made by hand.
"""

# Django's admin classes cannot be subscripted at run time
# mypy: disable-error-code="type-arg"

from __future__ import annotations

from django.contrib import admin
from django.contrib.auth.admin import UserAdmin
from django.http import HttpRequest

from orchestrator.accounts.models import ApiToken, AuditEntry, IdempotencyKey, Team, User


@admin.register(User)
class PersonAdmin(UserAdmin):
    list_display = ("username", "role", "email", "is_active", "last_login")
    list_filter = ("role", "is_active", "teams")
    fieldsets = (
        *(UserAdmin.fieldsets or ()),
        ("Orrery", {"fields": ("role", "must_change_password")}),
    )
    add_fieldsets = (*UserAdmin.add_fieldsets, ("Orrery", {"fields": ("role",)}))


@admin.register(Team)
class TeamAdmin(admin.ModelAdmin):
    list_display = ("name",)
    search_fields = ("name",)
    filter_horizontal = ("members",)


class ReadOnly(admin.ModelAdmin):
    """Look, do not touch: what these rows say is written by services."""

    def has_add_permission(self, request: HttpRequest) -> bool:
        return False

    def has_change_permission(self, request: HttpRequest, obj: object = None) -> bool:
        return False


@admin.register(ApiToken)
class TokenAdmin(ReadOnly):
    list_display = ("name", "prefix", "user", "created", "expires", "last_used", "revoked")
    list_select_related = ("user",)
    list_filter = ("revoked",)
    search_fields = ("name", "prefix", "user__username")


@admin.register(AuditEntry)
class AuditAdmin(ReadOnly):
    list_display = ("time", "actor_name", "action", "target", "ip")
    list_filter = ("action",)
    search_fields = ("actor_name", "target")
    date_hierarchy = "time"
    show_full_result_count = False

    def has_delete_permission(self, request: HttpRequest, obj: object = None) -> bool:
        return False


@admin.register(IdempotencyKey)
class IdempotencyAdmin(ReadOnly):
    list_display = ("route", "key", "user", "status", "created")
    list_select_related = ("user",)
