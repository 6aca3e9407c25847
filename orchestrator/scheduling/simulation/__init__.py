"""Runs scheduling policies on traces of runs, with the scheduler's own placement code."""
