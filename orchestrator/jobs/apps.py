"""Django app configuration of jobs."""

from django.apps import AppConfig


class JobsConfig(AppConfig):
    """The app `jobs`."""

    name = "orchestrator.jobs"
    label = "jobs"
    default_auto_field = "django.db.models.BigAutoField"
