"""Stores and reads metrics, events and logs of runs."""
