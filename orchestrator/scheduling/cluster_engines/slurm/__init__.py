"""Slurm behind the interface of cluster engines, by its commands."""
