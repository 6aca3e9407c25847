"""Django application of the web pages."""

from django.apps import AppConfig


class WebuiConfig(AppConfig):
    """Configuration of the `webui` application."""

    name = "webui"
    label = "webui"
