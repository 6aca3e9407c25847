"""Rewards that served models compute."""
