"""Notifications: subscriptions, messages about runs and nodes, signed and guarded delivery."""
