"""Lines of a run's log: their level, and groups of equal lines of several ranks."""
