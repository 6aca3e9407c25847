"""Views: one module per page, grouped by topic; `access` is shared by all."""
