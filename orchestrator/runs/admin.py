"""Experiments, runs, attempts, events and checkpoints in Django's admin: to look at.

States move through services.
"""

# Django's admin classes cannot be subscripted at run time
# mypy: disable-error-code="type-arg"

from __future__ import annotations

from django.contrib import admin
from django.http import HttpRequest

from orchestrator.runs.models import Artifact, Attempt, Checkpoint, Experiment, Run, RunEvent


class Looking(admin.ModelAdmin):
    """No hand-made rows and no edited states: a move writes its event and frame, a form would not."""

    show_full_result_count = False

    def has_add_permission(self, request: HttpRequest) -> bool:
        return False

    def has_change_permission(self, request: HttpRequest, obj: object = None) -> bool:
        return False


@admin.register(Experiment)
class ExperimentAdmin(admin.ModelAdmin):
    list_display = ("name", "owner", "created")
    list_select_related = ("owner",)
    search_fields = ("name", "hypothesis")


@admin.register(Run)
class RunAdmin(Looking):
    list_display = (
        "id",
        "name",
        "kind",
        "state",
        "owner",
        "model_name",
        "devices",
        "attempt_number",
        "created",
    )
    list_select_related = ("owner",)
    list_filter = ("state", "kind")
    search_fields = ("name", "owner__username")
    ordering = ("-id",)


@admin.register(Attempt)
class AttemptAdmin(Looking):
    list_display = ("id", "run", "number", "state", "exit_class", "created", "ended")
    list_select_related = ("run",)
    list_filter = ("state", "exit_class")
    search_fields = ("run__name", "fence")
    ordering = ("-id",)


@admin.register(RunEvent)
class EventAdmin(Looking):
    list_display = ("run", "seq", "time", "type", "attempt", "rank")
    list_select_related = ("run",)
    search_fields = ("run__name", "type")
    ordering = ("-id",)


@admin.register(Checkpoint)
class CheckpointAdmin(Looking):
    list_display = ("run", "step", "attempt", "bytes", "created", "deleted")
    list_select_related = ("run",)
    ordering = ("-id",)


@admin.register(Artifact)
class ArtifactAdmin(Looking):
    list_display = ("run", "name", "bytes", "created")
    list_select_related = ("run",)
    search_fields = ("name", "run__name")
