"""Django application of the web pages."""

from django.apps import AppConfig
from django.conf import settings
from django.core.exceptions import ImproperlyConfigured


class WebuiConfig(AppConfig):
    """Configuration of the `webui` application."""

    name = "webui"
    label = "webui"

    def ready(self) -> None:
        """Check the settings of the identity provider, before people log in."""
        if settings.ENV.oidc_issuer:
            from orchestrator.accounts.oidc_groups import MappingError
            from webui.oidc.adapters import group_mapping

            try:
                group_mapping()
            except MappingError as error:
                raise ImproperlyConfigured(f"{error}.") from None
