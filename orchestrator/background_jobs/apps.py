"""Django app configuration of the background jobs."""

from django.apps import AppConfig


class JobsConfig(AppConfig):
    """The app keeps the label `jobs`, which its tables have in their names."""

    name = "orchestrator.background_jobs"
    label = "jobs"
    default_auto_field = "django.db.models.BigAutoField"
