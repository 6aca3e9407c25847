"""Kubernetes behind the engine port: JobSets that Kueue admits."""
