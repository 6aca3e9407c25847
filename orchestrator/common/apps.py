from django.apps import AppConfig


class CommonConfig(AppConfig):
    """Registers the models of `common`."""

    name = "orchestrator.common"
    label = "common"
    default_auto_field = "django.db.models.BigAutoField"
