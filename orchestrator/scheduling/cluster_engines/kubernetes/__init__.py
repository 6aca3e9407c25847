"""Kubernetes behind the interface of cluster engines: JobSets that Kueue admits."""
