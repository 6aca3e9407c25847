from django.apps import AppConfig


class PlannerConfig(AppConfig):
    name = "orchestrator.planner"
    label = "planner"
    default_auto_field = "django.db.models.BigAutoField"
