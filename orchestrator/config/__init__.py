"""Composition root: settings, URLs, ASGI application and embedded mode."""
