"""Trials of plans on the granted devices, before the ranks of a run start."""
