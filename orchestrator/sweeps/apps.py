from django.apps import AppConfig


class SweepsConfig(AppConfig):
    """Registers the models of `sweeps`."""

    name = "orchestrator.sweeps"
    label = "sweeps"
    default_auto_field = "django.db.models.BigAutoField"
