"""Django app configuration of alerts."""

from django.apps import AppConfig


class AlertsConfig(AppConfig):
    """The app `alerts`."""

    name = "orchestrator.alerts"
    label = "alerts"
    default_auto_field = "django.db.models.BigAutoField"
