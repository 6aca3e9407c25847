"""Django app configuration of tracking."""

from django.apps import AppConfig


class TrackingConfig(AppConfig):
    """The app `tracking`."""

    name = "orchestrator.tracking"
    label = "tracking"
    default_auto_field = "django.db.models.BigAutoField"
