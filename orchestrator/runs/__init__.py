"""Experiments, runs, attempts, events, checkpoints and artifacts."""
