from django.apps import AppConfig


class AccountsConfig(AppConfig):
    """Registers the models of `accounts`."""

    name = "orchestrator.accounts"
    label = "accounts"
    default_auto_field = "django.db.models.BigAutoField"
