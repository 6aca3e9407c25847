"""The decoder family shared by training and inference.

Knows ModelSpec and torch; nothing of runs, plans or data.
"""
