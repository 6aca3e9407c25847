"""Weights made smaller: quantised linears, the search for what to round by, pruning and
factorisation, and reports.
"""
