"""Tabs of the run page: one module per tab; `content(facts, request)` returns its context."""
