"""Django app configuration of scheduling."""

from django.apps import AppConfig


class SchedulingConfig(AppConfig):
    """The app `scheduling`."""

    name = "orchestrator.scheduling"
    label = "scheduling"
    default_auto_field = "django.db.models.BigAutoField"
