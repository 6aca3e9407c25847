"""Trials of plans before a run: short trainings that measure each plan on the granted devices."""
