"""Weights of any format: location, opening, loading, checkpoints."""
