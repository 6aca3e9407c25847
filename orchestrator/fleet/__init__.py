"""Nodes, devices, pools and join tokens."""
