"""Experiments, runs, attempts, events, checkpoints and artifacts in Django's admin, read-only."""

# Django's admin classes cannot be subscripted at run time
# mypy: disable-error-code="type-arg"

from __future__ import annotations

from django.contrib import admin
from django.http import HttpRequest

from orchestrator.runs.models import Artifact, Attempt, Checkpoint, Experiment, Run, RunEvent


class ReadOnlyAdmin(admin.ModelAdmin):
    """No added or edited rows: a form would write neither event nor frame."""

    show_full_result_count = False

    def has_add_permission(self, request: HttpRequest) -> bool:
        """Never."""
        return False

    def has_change_permission(self, request: HttpRequest, obj: object = None) -> bool:
        """Never."""
        return False


@admin.register(Experiment)
class ExperimentAdmin(admin.ModelAdmin):
    """Experiments."""

    list_display = ("name", "owner", "created")
    list_select_related = ("owner",)
    search_fields = ("name", "hypothesis")


@admin.register(Run)
class RunAdmin(ReadOnlyAdmin):
    """Runs."""

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
class AttemptAdmin(ReadOnlyAdmin):
    """Attempts."""

    list_display = ("id", "run", "number", "state", "exit_class", "created", "ended")
    list_select_related = ("run",)
    list_filter = ("state", "exit_class")
    search_fields = ("run__name", "fence")
    ordering = ("-id",)


@admin.register(RunEvent)
class EventAdmin(ReadOnlyAdmin):
    """Run events."""

    list_display = ("run", "seq", "time", "type", "attempt", "rank")
    list_select_related = ("run",)
    search_fields = ("run__name", "type")
    ordering = ("-id",)


@admin.register(Checkpoint)
class CheckpointAdmin(ReadOnlyAdmin):
    """Checkpoints."""

    list_display = ("run", "step", "attempt", "bytes", "created", "deleted")
    list_select_related = ("run",)
    ordering = ("-id",)


@admin.register(Artifact)
class ArtifactAdmin(ReadOnlyAdmin):
    """Artifacts."""

    list_display = ("run", "name", "bytes", "created")
    list_select_related = ("run",)
    search_fields = ("name", "run__name")
