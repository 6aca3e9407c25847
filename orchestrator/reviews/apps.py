"""Django app configuration of reviews."""

from django.apps import AppConfig


class ReviewsConfig(AppConfig):
    """The app `reviews`."""

    name = "orchestrator.reviews"
    label = "reviews"
    default_auto_field = "django.db.models.BigAutoField"
