"""Rewards of sampled answers: rules, judges and the user's functions."""
