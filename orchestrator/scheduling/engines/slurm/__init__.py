"""Slurm behind the engine port, by its commands."""
