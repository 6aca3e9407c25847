"""Archives of runs and experiments that a job builds for download."""
