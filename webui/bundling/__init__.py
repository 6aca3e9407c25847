"""Bundles the scripts and styles of the pages."""
