"""Embedded mode: one command starts all processes of a cluster on this machine."""
