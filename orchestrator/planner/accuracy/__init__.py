"""Accuracy of predictions against measured runs: splits, errors, rows of docs/planner-accuracy.md.

Reads measurement files by path.
"""
