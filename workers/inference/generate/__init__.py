"""Runs of kind generate."""
