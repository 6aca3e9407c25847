"""Decides which runs get which devices, sends orders to nodes and handles their reports."""
