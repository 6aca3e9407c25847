"""Distributes a model over ranks: mesh, transforms and each form of parallelism."""
