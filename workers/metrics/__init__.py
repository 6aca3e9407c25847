"""Measurements of a rank and their recording: throughput, peaks, memory, progress, events.

Does not depend on training.
"""
