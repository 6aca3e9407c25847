"""Runs of kind evaluate: likelihood of texts, and answers compared with references."""
