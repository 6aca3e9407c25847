"""Django app configuration of device_history."""

from django.apps import AppConfig


class DeviceHistoryConfig(AppConfig):
    """The app `device_history`."""

    name = "orchestrator.device_history"
    label = "device_history"
    default_auto_field = "django.db.models.BigAutoField"
