"""Fits the planner's parameters to measured runs."""
