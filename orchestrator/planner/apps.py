"""Django app configuration of the planner."""

from django.apps import AppConfig


class PlannerConfig(AppConfig):
    """The planner app."""

    name = "orchestrator.planner"
    label = "planner"
    default_auto_field = "django.db.models.BigAutoField"
