"""Django app configuration of reports."""

from django.apps import AppConfig


class ReportsConfig(AppConfig):
    """The app `reports`."""

    name = "orchestrator.reports"
    label = "reports"
    default_auto_field = "django.db.models.BigAutoField"
