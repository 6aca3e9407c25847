"""Replicas behind one endpoint: discovery, routing, forwarding, statistics."""
