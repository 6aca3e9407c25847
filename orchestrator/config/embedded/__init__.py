"""Embedded mode: one machine, one command.

Starts the same processes that a cluster runs one by one.
"""
