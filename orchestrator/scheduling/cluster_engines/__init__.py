"""Schedulers outside Orrery: their interface, Slurm, Kubernetes, and passes over their jobs."""
