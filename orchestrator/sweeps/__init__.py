"""Sweeps: parents of runs that search parameters of a spec."""
