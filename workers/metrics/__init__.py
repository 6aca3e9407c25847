"""A step's numbers as JSON lines, and where they come from: FLOPs, peaks, memory.

Knows contracts and torch; does not know training.
"""
