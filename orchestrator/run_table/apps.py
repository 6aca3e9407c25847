"""Django app configuration of the runs table."""

from django.apps import AppConfig


class RunTableConfig(AppConfig):
    """The app `run_table`."""

    name = "orchestrator.run_table"
    label = "run_table"
    default_auto_field = "django.db.models.BigAutoField"
