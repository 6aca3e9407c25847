"""Management commands of the planner."""
