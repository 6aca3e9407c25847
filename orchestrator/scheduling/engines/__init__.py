"""Engines that schedule runs: the port, Slurm, and the passes that keep jobs and runs equal."""
