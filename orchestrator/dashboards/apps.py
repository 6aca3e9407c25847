"""Django app configuration of dashboards."""

from django.apps import AppConfig


class DashboardsConfig(AppConfig):
    """The app `dashboards`."""

    name = "orchestrator.dashboards"
    label = "dashboards"
    default_auto_field = "django.db.models.BigAutoField"
