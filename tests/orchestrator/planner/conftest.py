"""Registers every term of the planner before its tests."""

import orchestrator.planner.model.all_terms  # noqa: F401
