"""Trials of plans before a run: candidates at submit, orders to nodes, reports, results."""
