"""Connections to the broker: TLS, and the users of nodes."""
