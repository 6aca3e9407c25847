"""Panels of dashboards and reports on pages."""
