"""Durable outbox: logs, points and events from run directories to Redis."""
