"""Serve runs as deployments of the planner."""
