"""Stored calibrations, own devices and saved plans."""
