"""Views: one module per page."""
