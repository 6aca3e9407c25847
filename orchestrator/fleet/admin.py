"""Clusters, pools, nodes, devices and join tokens in Django's admin, without keys and nonces."""

# Django's admin classes cannot be subscripted at run time
# mypy: disable-error-code="type-arg"

from __future__ import annotations

from django.contrib import admin
from django.http import HttpRequest

from orchestrator.fleet.models import Cluster, Device, JoinToken, Node, Pool


@admin.register(Cluster)
class ClusterAdmin(admin.ModelAdmin):
    """Clusters."""

    list_display = ("name",)


@admin.register(Pool)
class PoolAdmin(admin.ModelAdmin):
    """Pools with priority and quota."""

    list_display = ("name", "priority", "max_devices_per_user")
    list_editable = ("priority", "max_devices_per_user")


class DeviceInline(admin.TabularInline):
    """The devices of a node."""

    model = Device
    extra = 0
    can_delete = False
    readonly_fields = ("index", "kind", "name", "catalogue", "memory_bytes", "uuid")

    def has_add_permission(self, request: HttpRequest, obj: object = None) -> bool:
        """Never."""
        return False


@admin.register(Node)
class NodeAdmin(admin.ModelAdmin):
    """Nodes."""

    list_display = ("name", "pool", "health", "drained", "address", "last_heartbeat")
    list_select_related = ("pool",)
    list_filter = ("health", "drained", "pool")
    search_fields = ("name", "hostname", "address")
    readonly_fields = (
        "name",
        "health",
        "inventory",
        "sample",
        "joined",
        "last_heartbeat",
        "hostname",
    )
    exclude = ("join_token_id", "join_nonces")
    inlines = (DeviceInline,)

    def has_add_permission(self, request: HttpRequest) -> bool:
        """Never: nodes join by themselves."""
        return False


@admin.register(JoinToken)
class JoinTokenAdmin(admin.ModelAdmin):
    """Join tokens, without their texts."""

    list_display = ("id", "pool", "created", "created_by", "expires", "used", "node")
    list_select_related = ("pool", "node")

    def has_add_permission(self, request: HttpRequest) -> bool:
        """Never: the service that creates a token shows its text."""
        return False

    def has_change_permission(self, request: HttpRequest, obj: object = None) -> bool:
        """Never."""
        return False
