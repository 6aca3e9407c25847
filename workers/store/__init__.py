"""Copies files of a node into the store and back. Does not depend on Redis, Django or torch."""
