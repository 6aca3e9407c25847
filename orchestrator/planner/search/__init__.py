"""Enumerates and ranks plans, and gives advice."""
