"""Predictions of submitted runs by the planner: serving, training, the whole run."""
