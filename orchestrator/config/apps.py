"""Registers the management commands of `config` and restricts the data directory at a start."""

from __future__ import annotations

import os

from django.apps import AppConfig
from django.conf import settings
from django.db.backends.signals import connection_created

from orchestrator.config import private_files


class ConfigConfig(AppConfig):
    """The project's own app."""

    name = "orchestrator.config"
    label = "config"
    default_auto_field = "django.db.models.BigAutoField"

    def ready(self) -> None:
        """Restrict the data directory and the database to this user."""
        private_files.restrict(
            settings.ENV.home,
            private_files.database_file(),
            passable=os.geteuid() == 0 and settings.ENV.run_as != "agent",
        )
        connection_created.connect(private_files.restrict_new_database)
