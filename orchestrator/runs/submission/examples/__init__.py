"""Checks and previews of example files when a run is submitted."""
