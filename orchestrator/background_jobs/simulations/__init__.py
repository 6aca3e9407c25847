"""Simulations that users request; a job runs them in the background."""
