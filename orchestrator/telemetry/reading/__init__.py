"""Reads rows back as curves, log lines and newest values, for `selectors`."""
