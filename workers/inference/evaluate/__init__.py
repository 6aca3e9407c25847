"""Runs of kind evaluate: how likely a model finds text, and how its answers compare with
references.
"""
