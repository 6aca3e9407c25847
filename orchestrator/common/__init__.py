"""Conditional updates, live frames, errors, units and time."""
