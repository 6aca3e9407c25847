"""Calibrations, own devices and saved plans in Django's admin.

What is fitted or described is not edited there.
"""

# Django's admin classes cannot be subscripted at run time
# mypy: disable-error-code="type-arg"

from __future__ import annotations

from django.contrib import admin
from django.http import HttpRequest

from orchestrator.planner.models import Calibration, DeviceType, SavedPlan


class KeptByServices(admin.ModelAdmin):
    """Made and changed through pages and API, which check and fit; here one looks and deletes."""

    def has_add_permission(self, request: HttpRequest) -> bool:
        return False

    def has_change_permission(self, request: HttpRequest, obj: object = None) -> bool:
        return False


@admin.register(Calibration)
class CalibrationAdmin(KeptByServices):
    list_display = ("name", "device", "framework", "rows", "default", "created_by", "fitted")
    list_select_related = ("created_by",)
    list_filter = ("device", "framework", "default")
    search_fields = ("name",)
    exclude = ("document", "measurements")


@admin.register(DeviceType)
class DeviceTypeAdmin(KeptByServices):
    list_display = ("name", "owner", "created")
    list_select_related = ("owner",)
    search_fields = ("name",)


@admin.register(SavedPlan)
class SavedPlanAdmin(KeptByServices):
    list_display = ("name", "owner", "created")
    list_select_related = ("owner",)
    search_fields = ("name",)
