"""Executes runs under another user than the agent's."""
