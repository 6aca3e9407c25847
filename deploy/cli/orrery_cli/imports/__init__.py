"""Readers of other trackers' files, and the transfer of what they read."""
