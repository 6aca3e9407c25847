"""Django admin of calibrations, own devices and saved plans: view and delete only."""

# Django's admin classes cannot be subscripted at run time
# mypy: disable-error-code="type-arg"

from __future__ import annotations

from django.contrib import admin
from django.http import HttpRequest

from orchestrator.planner.models import Calibration, DeviceType, SavedPlan


class ReadOnlyAdmin(admin.ModelAdmin):
    """Rows that only services create and change, because these validate and fit."""

    def has_add_permission(self, request: HttpRequest) -> bool:
        """Always false."""
        return False

    def has_change_permission(self, request: HttpRequest, obj: object = None) -> bool:
        """Always false."""
        return False


@admin.register(Calibration)
class CalibrationAdmin(ReadOnlyAdmin):
    """Calibrations."""

    list_display = ("name", "device", "framework", "rows", "default", "created_by", "fitted")
    list_select_related = ("created_by",)
    list_filter = ("device", "framework", "default")
    search_fields = ("name",)
    exclude = ("document", "measurements")


@admin.register(DeviceType)
class DeviceTypeAdmin(ReadOnlyAdmin):
    """Own devices."""

    list_display = ("name", "owner", "created")
    list_select_related = ("owner",)
    search_fields = ("name",)


@admin.register(SavedPlan)
class SavedPlanAdmin(ReadOnlyAdmin):
    """Saved plans."""

    list_display = ("name", "owner", "created")
    list_select_related = ("owner",)
    search_fields = ("name",)
