"""Advice: single changes that make a plan, or some plan of a search, fit in memory."""
