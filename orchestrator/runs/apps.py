from django.apps import AppConfig


class RunsConfig(AppConfig):
    """Registers the models of `runs`."""

    name = "orchestrator.runs"
    label = "runs"
    default_auto_field = "django.db.models.BigAutoField"
