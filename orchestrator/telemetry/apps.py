"""Django app configuration of telemetry."""

from django.apps import AppConfig


class TelemetryConfig(AppConfig):
    """The app `telemetry`."""

    name = "orchestrator.telemetry"
    label = "telemetry"
    default_auto_field = "django.db.models.BigAutoField"
