"""Supervisors in jobs of other engines, such as Slurm."""
