"""The newest decision about the waiting runs, and what pages and REST read of it."""
