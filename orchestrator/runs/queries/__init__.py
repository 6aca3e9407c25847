"""Queries of runs and attempts; `selectors` offers them to other packages."""
