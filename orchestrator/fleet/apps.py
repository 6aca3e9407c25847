from django.apps import AppConfig


class FleetConfig(AppConfig):
    """Registers the models of `fleet`."""

    name = "orchestrator.fleet"
    label = "fleet"
    default_auto_field = "django.db.models.BigAutoField"
