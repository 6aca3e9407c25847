"""Login by an identity provider with OpenID Connect, by django-allauth; loaded if configured."""
