from django.apps import AppConfig


class DeadLettersConfig(AppConfig):
    """Registers the model of `dead_letters`."""

    name = "orchestrator.dead_letters"
    label = "dead_letters"
    default_auto_field = "django.db.models.BigAutoField"
