from django.apps import AppConfig


class ConfigConfig(AppConfig):
    """Registers the management commands of `config`."""

    name = "orchestrator.config"
    label = "config"
    default_auto_field = "django.db.models.BigAutoField"
