"""Checks a submitted spec, resolves its plan and queues the run."""
