"""Handles reports from nodes: heartbeats, state changes, hangs and exits."""
