"""Text to token ids and back, and stop strings."""
